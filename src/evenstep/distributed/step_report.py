"""The report of each process on its part of a step, and what follows from all reports.

Reports hold the small values of a step: how it went, the shards' losses, buffers, and gradients
that may be sparse. Dense gradients travel as flat vectors (`gradient_reduce`).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import optree
import torch
from safetensors.torch import load, save

from evenstep.batch import Batch
from evenstep.batch.own_shards import Shards
from evenstep.batch.whole import Shared
from evenstep.devices.addresses import bytes_of, row_major
from evenstep.distributed.process_group import Peers
from evenstep.errors import ContractError, EvenstepError, PeerError
from evenstep.private_torch.tensors import rows_of

Facts: TypeAlias = "tuple[int, ...]"
"""The step, its epoch and batch, the batch's examples, whether the step ends with an update, a
checksum of the gradients of the user's own that are added (0 for none), and where each process's
run ends."""

_HEAD = struct.Struct("<bb?qd5i")

NO_DIGEST = -1
"""Of a batch that is not compared in this step."""

_OWN = 1 << 32
"""Added to the digest of a batch that a loop over an epoch has made itself."""


class Verdict(enum.IntEnum):
    """How a process's part of a step ended."""

    DONE = 0
    AGAIN = 1
    FAILED = 2


class Kind(enum.IntEnum):
    """How a process computes its shards. Compiled code rounds differently from eager code."""

    NONE = 0
    EAGER = 1
    COMPILED = 2


class AgainError(EvenstepError):
    """A process asks all processes for another attempt at the step."""


@dataclasses.dataclass(frozen=True)
class Report:
    """One process's part of a step, as all processes receive it.

    Attributes:
        verdict: how the part ended.
        facts: the step, and the facts about it that must agree.
        story: why the part failed.
        stop: whether the process was asked to stop.
        kind: how the process computes its shards.
        digest: of the batch that the process was given (see `batch_digest` and `own_digest`).
        speed: how many shards a second the process computes; 0 while unknown.
        leaves: each own shard's total and count.
        present: for each own partial sum, 1 for each parameter that has a gradient, else 0.
        tensors: the partial sums' buffers, and their gradients that may be sparse, by name.
    """

    verdict: Verdict
    facts: Facts
    story: str = ""
    stop: bool = False
    kind: Kind = Kind.NONE
    digest: int = NO_DIGEST
    speed: float = 0.0
    leaves: Sequence[tuple[float, float]] = ()
    present: Sequence[bytes] = ()
    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the report as bytes: numbers, then text, then safetensors if there are any.

        None of them holds code.
        """
        story, present = self.story.encode(), b"".join(self.present)
        lengths = (len(self.facts), len(self.leaves), len(self.present), len(present), len(story))
        head = (self.verdict, self.kind, self.stop, self.digest, self.speed, *lengths)
        leaves = itertools.chain.from_iterable(self.leaves)
        numbers = struct.pack(f"<{lengths[0]}q{2 * lengths[1]}d", *self.facts, *leaves)
        tensors = save({**self.tensors}) if self.tensors else b""
        return b"".join([_HEAD.pack(*head), numbers, present, story, tensors])


def decoded(message: bytes) -> Report:
    """Read what `Report.encoded` wrote."""
    head, start = _HEAD.unpack_from(message), _HEAD.size
    verdict, kind, stop, digest, speed, facts, leaves, rows, present, story = head
    numbers = struct.unpack_from(f"<{facts}q{2 * leaves}d", message, start)
    start += 8 * len(numbers)
    ends = [start, start + present, start + present + story]
    flat, text = message[ends[0] : ends[1]], message[ends[1] : ends[2]].decode(errors="replace")
    each = present // rows if rows else 0
    return Report(
        Verdict(verdict),
        numbers[:facts],
        text,
        stop,
        Kind(kind),
        digest,
        speed,
        [*zip(numbers[facts::2], numbers[facts + 1 :: 2], strict=True)],
        [flat[row * each : (row + 1) * each] for row in range(rows)],
        load(message[ends[2] :]) if len(message) > ends[2] else {},
    )


def check_reports(reports: Sequence[Report], peers: Peers, but: int | None = None) -> None:
    """Raise an error if another process failed, asks for a retry, or takes another step."""
    others = [(rank, report) for rank, report in enumerate(reports) if rank != but]
    for rank, report in others:
        if report.verdict is Verdict.FAILED:
            raise peers.failed(rank, report.story)
    for rank, report in others:
        if report.verdict is Verdict.AGAIN:
            raise AgainError(f"rank {rank} asks for step {report.facts[0]} to be done again")
    own = reports[peers.rank].facts
    for rank, report in others:
        if report.facts != own:
            raise PeerError(
                f"rank {peers.rank} is at {_spelled(own)}, but rank {rank} (on "
                f"{peers.hosts[rank]}) is at {_spelled(report.facts)}: every process must take the "
                f"same steps of the same batches, and add the same gradients of its own",
                rank,
            )
    compared = range(NO_DIGEST + 1, _OWN)
    digests = {rank: one.digest for rank, one in enumerate(reports) if one.digest in compared}
    refuse_other_batches(digests, peers, f"step {own[0]}")
    _refuse_mixed(reports, peers)


def batch_digest(batch: Batch, *, is_whole: bool) -> int:
    """Return a checksum of what must be the same in every process.

    It is of the nesting, and of each tensor's dtype, shape and bytes. Unless the batch `is_whole`,
    only the tensors that all shards share are the same.
    """
    whole: Any = batch
    if isinstance(batch, tuple):
        whole = tuple(one.batches if isinstance(one, Shards) else one for one in batch)
    leaves, structure = optree.tree_flatten(whole)
    digest = zlib.crc32(str(structure).encode())
    for leaf in leaves:
        if not (is_whole or isinstance(leaf, Shared)):
            continue
        tensor = leaf.tensor if isinstance(leaf, Shared) else leaf
        digest = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest)
        digest = zlib.crc32(bytes_of(tensor).numpy().data, digest)
    return digest


def own_digest(batch: Batch) -> int:
    """Return a checksum of a batch that a loop has made where each process has a part in hand."""
    return _OWN + batch_digest(batch, is_whole=True)


def are_no_parts(reports: Sequence[Report]) -> bool:
    """Return whether all processes gave the same, where each should have given another part."""
    digest, *others = {report.digest for report in reports}
    return digest >= _OWN and not others and len(reports) > 1


def refuse_other_batches(digests: Mapping[int, int], peers: Peers, place: str) -> None:
    """Refuse batches, or tensors that all shards share, that differ between the processes.

    The digests are given by rank; `place` names the batch, such as "step 3".
    """
    if len({*digests.values()}) < 2:
        return
    (usual, _), *_ = collections.Counter(digests.values()).most_common(1)
    others = [rank for rank, digest in digests.items() if digest != usual]
    named = " and ".join(f"rank {rank} (on {peers.hosts[rank]})" for rank in others)
    first = next(rank for rank, digest in digests.items() if digest == usual)
    raise ContractError(
        f"in {place} {named} {'was' if len(others) == 1 else 'were'} given "
        f"a different batch than rank {first}: each process computes its shards of the batch and "
        f"drops the rest, so a part of the data would never be seen. Usual causes are a "
        f"DistributedSampler, a shuffle without a seed, or a seed for each rank: use `for batch in "
        f"trainer.epoch(loader)` with an evenstep.data.Loader (trainer.evaluate and predict take "
        f"one too), or give every process the same whole batches (no DistributedSampler, the same "
        f"seed everywhere)"
    )


def _refuse_mixed(reports: Sequence[Report], peers: Peers) -> None:
    """Refuse a step in which some shards are compiled and others are not."""
    kinds = {report.kind: rank for rank, report in enumerate(reports)}
    if Kind.EAGER in kinds and Kind.COMPILED in kinds:
        rank = kinds[Kind.EAGER]
        raise PeerError(
            f"rank {rank} (on {peers.hosts[rank]}) can't compile its shards, though others can: "
            f"its log says why; make them compile there too, or leave out compile=True",
            rank,
        )


def _spelled(facts: Facts) -> str:
    step, epoch, batch, examples, updates, own, *ends = facts
    runs = ", ".join(map(str, ends))
    name = "step" if updates else "backward in step"
    added = f", gradients of your own added with checksum {own:08x}" if own else ""
    return (
        f"{name} {step} (epoch {epoch}, batch {batch}, {examples} examples, runs end at {runs}"
        f"{added})"
    )


def named(
    prefix: str, tensors: Iterable[tuple[int, torch.Tensor | None]]
) -> dict[str, torch.Tensor]:
    """Return contiguous CPU tensors by name; a sparse tensor becomes its indices and values.

    Repeated rows stay apart, as in the gradient of a whole batch: added up, they round differently.
    """
    result = {}
    for number, tensor in tensors:
        if tensor is not None and tensor.is_sparse:
            indices, values = rows_of(tensor)
            result[f"{prefix}/{number}/indices"] = row_major(indices)
            result[f"{prefix}/{number}/values"] = row_major(values)
            result[f"{prefix}/{number}/coalesced"] = torch.tensor(tensor.is_coalesced())
            result[f"{prefix}/{number}/shape"] = torch.tensor(tensor.shape)
        elif tensor is not None:
            result[f"{prefix}/{number}"] = row_major(tensor)
    return result


def unnamed(
    tensors: Mapping[str, torch.Tensor], name: str, device: torch.device
) -> torch.Tensor | None:
    """Return the tensor that `named` stored under `name`; None if there is none."""
    if name in tensors:
        return tensors[name].to(device)
    if f"{name}/indices" not in tensors:
        return None
    indices, values = tensors[f"{name}/indices"], tensors[f"{name}/values"]
    size = tensors[f"{name}/shape"].tolist()
    is_coalesced = bool(tensors[f"{name}/coalesced"])
    return torch.sparse_coo_tensor(
        indices, values, size, is_coalesced=is_coalesced, check_invariants=False
    ).to(device)
