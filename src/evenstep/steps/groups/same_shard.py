"""One shard that every process computes: what it gives must not depend on the process."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from safetensors.torch import load, save

from evenstep.batch import Batch
from evenstep.batch.cut import Cut, Place
from evenstep.contract.rehearsal import SentShard
from evenstep.distributed import Exchange, Peers
from evenstep.distributed.step_report import refuse_other_batches
from evenstep.errors import CheckpointError, ContractError, text_of
from evenstep.steps.outputs import pack_outputs, unpack_outputs

_SHARD = 0  # its owner sends the examples: the others may not have loaded them

Results: TypeAlias = "Mapping[str, str] | None"
"""The digest of each result of a shard by name, in order; None where it could not be computed."""

Compute: TypeAlias = "Callable[[SentShard], Results]"


def refuse_other_results(
    peers: Peers,
    step: int,
    cut: Cut,
    seed: Callable[[int], int],
    compute: Compute,
    attributes: Mapping[str, str],
) -> None:
    """Compute one shard in every process, each of which must call this, and compare the bits.

    Args:
        peers: the processes.
        step: the number of the step, which has not begun.
        cut: its batch, of which this process may hold only its own shards.
        seed: returns the seed of a shard's random numbers.
        compute: computes a shard.
        attributes: the modes, numbers and strings of the model's layers, by name.

    Raises:
        ContractError: the bits differ; or what the batches have besides tensors.
        Exception: the error of `compute`, and in the other processes PeerError. An error that all
            have is left to the step, which meets it again.
    """
    own = _packed(cut, seed)
    messages = peers.gather(own, Exchange("step", "the examples of a shard", step))
    sent = next(filter(None, messages), b"")
    if not sent:
        return
    tensors, examples, its_seed = unpack_outputs(load(sent))

    def take(place: Place) -> Batch:
        return cut.structure_of(_SHARD).unflatten(map(place, tensors))

    error: Exception | None = None
    answer: dict[str, Any] = {
        "hash": hash("evenstep"),
        "nesting": _digest_of_nesting(cut),
        "attributes": attributes,
    }
    try:
        answer["results"] = compute(SentShard(_SHARD, take, examples, cut.divisor, its_seed))
    except Exception as caught:
        error = caught
        answer["error"] = f"{type(caught).__name__}: {text_of(caught)}".removesuffix(": ")
    exchange = Exchange("step", "the results of a shard", step)
    answers = [json.loads(one) for one in peers.gather(json.dumps(answer).encode(), exchange)]
    nestings = {rank: one["nesting"] for rank, one in enumerate(answers)}
    refuse_other_batches(nestings, peers, f"step {step}")
    judged = {
        rank: one
        for rank, one in enumerate(answers)
        if "error" in one or one["results"] is not None
    }
    failed = [rank for rank, one in judged.items() if "error" in one]
    if len(failed) == len(judged):
        return
    if error is not None:
        raise error
    if failed:
        raise peers.failed(failed[0], judged[failed[0]]["error"])
    _compare(peers, step, judged)


def _packed(cut: Cut, seed: Callable[[int], int]) -> bytes:
    """Return the shard as bytes; none where this process does not hold it, or it can't be sent."""
    if _SHARD not in cut.views:
        return b""
    tensors = [view.as_subclass(torch.Tensor) for view in cut.views[_SHARD]]
    lo, hi = cut.bounds[_SHARD]
    try:
        packed = pack_outputs([tensors, None if cut.filled == 1 else hi - lo, seed(_SHARD)])
    except CheckpointError:  # a tensor of a kind that no file holds
        return b""
    return save(packed)


def _digest_of_nesting(cut: Cut) -> int:
    """Return a checksum of the batch's nesting, with the numbers and strings in it."""
    return zlib.crc32(str(cut.structure_of(_SHARD)).encode())


def _compare(peers: Peers, step: int, judged: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse results that differ from those of the first process.

    Raises:
        ContractError: names the two processes, and the first result that differs.
    """
    (first, usual), *others = judged.items()
    for rank, one in others:
        if one["results"] == usual["results"]:
            continue
        names = {**usual["results"], **one["results"]}
        name = next(
            name for name in names if one["results"].get(name) != usual["results"].get(name)
        )
        raise ContractError(
            f"before step {step}, rank {first} (on {peers.hosts[first]}) and rank {rank} (on "
            f"{peers.hosts[rank]}) computed the same shard from the same parameters, buffers and "
            f"random numbers, and the bits differ: the first that differs is {name}. So the "
            f"result would depend on which process computes which shard. "
            f"{_cause(usual, one)}"
        )


def _cause(usual: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return what probably makes two processes compute differently."""
    here, there = usual["attributes"], other["attributes"]
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if names:
        found = [
            f"model.{name} ({here.get(name, 'missing')} and {there.get(name, 'missing')})"
            for name in names[:3]
        ]
        return f"Their models differ in {', '.join(found)}: give every process the same model"
    others = (
        "code that reads RANK, the host's name, os.environ, the locale, the clock or a file, or a "
        "variable or an attribute that the script gives a different value in one process"
    )
    if usual["hash"] != other["hash"]:
        return (
            f"The processes hash strings differently, so the most likely cause is code that "
            f"iterates over a set of strings: sort it, or set PYTHONHASHSEED to the same number "
            f"for all. Another is {others}"
        )
    return f"Usual causes are {others}"
