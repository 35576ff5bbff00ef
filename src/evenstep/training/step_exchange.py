"""What the processes of a job bring together in every step: losses, buffers, gradients.

Each process sums the canonical nodes inside its run of shards (its tops). All tell each other in a
report how it went, the shards' losses, and what is small: buffers, and gradients that may be
sparse. The dense gradients go by `canonical_sum`, as flat vectors. What comes out is the root of
the tree, the same everywhere and the same as in one process.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import load, save
from torch import nn

from evenstep.batch import Batch, Dealing
from evenstep.checkpoint.codec import decode, encode
from evenstep.collectives import Forest
from evenstep.distributed import Peers
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import Sending, dense_sum
from evenstep.errors import EvenstepError, PeerError, SaveError
from evenstep.replicas import Replica, Replicas
from evenstep.shard.evaluation import Pairs
from evenstep.shard.forward_backward import Leaf, NodeSum, add_nodes
from evenstep.shard.gradients import sparse_error

Place: TypeAlias = "tuple[int, ...]"
"""The step, its epoch and batch there, the batch's examples, and where each process's run ends."""


_SHAPE = "the nesting of the outputs"  # no name that `encode` gives


class Verdict(enum.IntEnum):
    """What a process says of its part of a step."""

    DONE = 0
    AGAIN = 1
    FAILED = 2


class Way(enum.IntEnum):
    """How a process computes its shards of a step: compiled code rounds in its own way."""

    NONE = 0
    EAGER = 1
    COMPILED = 2


class AgainError(EvenstepError):
    """A process asks all to do the step again."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a process tells the others of its part of a step.

    Attributes:
        verdict: how it went.
        place: where the process is.
        story: why it failed.
        stop: whether it was asked to stop.
        way: how it computes its shards.
        speed: how many shards a second it computes; 0 while it isn't known.
        leaves: float64 (shards of its own, 2): each one's total and count.
        present: bool (tops of its own, parameters): which gradients a top has.
        tensors: buffers and loose gradients of its tops, by a name of each.
    """

    verdict: Verdict
    place: Place
    story: str = ""
    stop: bool = False
    way: Way = Way.NONE
    speed: float = 0.0
    leaves: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, 2))
    present: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, 0))
    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return it as bytes (safetensors: nothing in it is ever run)."""
        story = torch.tensor([self.verdict, *self.story.encode()], dtype=torch.uint8)
        place = torch.tensor([*self.place, self.stop, self.way])
        speed = torch.tensor(self.speed, dtype=torch.float64)
        fixed = {"place": place, "story": story, "speed": speed}
        sums = {"leaves": self.leaves, "present": self.present}
        return save({**fixed, **sums, **self.tensors})


def decoded(message: bytes) -> Report:
    """Read what `Report.encoded` wrote."""
    tensors = load(message)
    verdict, *story = tensors.pop("story").tolist()
    *place, stop, way = tensors.pop("place").tolist()
    return Report(
        Verdict(verdict),
        tuple(place),
        bytes(story).decode(errors="replace"),
        bool(stop),
        Way(way),
        tensors.pop("speed").item(),
        tensors.pop("leaves"),
        tensors.pop("present"),
        tensors,
    )


class Exchange:
    """Brings the parts of each step together.

    Args:
        peers: the processes.
        replicas: whose gradients and buffers they are.
        speeds: for each process how fast it is, relative to the others, until that is measured.
        own_speed: says how many shards a second this one computes; 0 while it isn't known.
        in_flight: how many steps may be begun and not finished.

    Attributes:
        peers: the processes.
        dealing: which process computes which shards.
        stop_asked: whether this process was asked to stop.
        stop_seen: the first step in which one of them was; None so far.
    """

    def __init__(
        self,
        peers: Peers,
        replicas: Replicas,
        speeds: Sequence[float],
        own_speed: Callable[[], float],
        in_flight: int,
    ) -> None:
        self.peers = peers
        self._in_flight = in_flight
        self._replicas = replicas
        self._own_speed = own_speed
        self.dealing = Dealing(speeds)
        self.stop_asked = False
        self.stop_seen: int | None = None
        self._home = replicas.home
        self._loose = _loose_parameters(self._home.module)
        self._flats = _places_of(self._home, self._loose)
        self._dense = dense_sum(peers, self._flats, on_cpus=replicas.on_cpus)

    def note(self, doing: str) -> None:
        """Say what this process is doing from now on, for others that wait for it."""
        self.peers.board.note(doing)

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.peers.rank

    def begin(self, trees: Forest, step: int) -> Sending:
        """Return where the gradients of a step go as they become final."""
        if self._home is not self._replicas.home:
            self._follow_home()
        return self._dense.begin(trees, len(self._home.parameters), step)

    def report(
        self,
        trees: Forest,
        place: Place,
        leaves: Mapping[int, Leaf],
        tops: Sequence[NodeSum],
        sending: Sending,
        way: Way,
    ) -> Report:
        """Return what the others are to be told of this process's part of a step.

        Raises:
            ModelError: a gradient that can't be sent.
        """
        for top in tops:
            for i, gradient in enumerate(top.gradients):
                if gradient is not None and gradient.is_sparse and i not in self._loose:
                    raise sparse_error(self._home, i)
        sending.write_rest([top.gradients for top in tops])
        numbers = [[float(number) for number in leaves[shard]] for shard in trees.runs[self.rank]]
        present = torch.tensor(sending.present).reshape(-1, len(self._home.parameters)) > 0
        tensors: dict[str, torch.Tensor] = {}
        for number, top in enumerate(tops):
            present[number, sorted(self._loose)] = torch.tensor(
                [top.gradients[i] is not None for i in sorted(self._loose)], dtype=torch.bool
            )
            tensors |= _named(f"buffer/{number}", enumerate(top.buffers))
            tensors |= _named(f"gradient/{number}", [(i, top.gradients[i]) for i in self._loose])
        return Report(
            Verdict.DONE,
            place,
            stop=self.stop_asked,
            way=way,
            speed=self._own_speed(),
            leaves=torch.tensor(numbers, dtype=torch.float64).reshape(-1, 2),
            present=present,
            tensors=tensors,
        )

    def complete(
        self, trees: Forest, weights: Sequence[int], report: Report, sending: Sending
    ) -> tuple[dict[int, Leaf], NodeSum]:
        """Bring a step's parts together; called by every process, in a lane.

        Args:
            trees: who sums what.
            weights: of all shards, in examples.
            report: this process's.
            sending: where its gradients went.

        Returns:
            the leaves of all shards, and the root of the tree.

        Raises:
            AgainError: a process asks for the step to be done again.
            PeerError: a process failed, did not come in time, or is somewhere else.
        """
        reports = self._gather(report)
        _heed(reports, self.peers)
        self.dealing.hear(report.place[0], [other.speed for other in reports])
        if self.stop_seen is None and any(report.stop for report in reports):
            self.stop_seen = report.place[0]
        try:
            totals = sending.total()
            self._dense.settle(trees, report.place[0] + self._in_flight)
        except PeerError as error:
            raise self.peers.told(error, f"the gradients of step {report.place[0]}") from error
        parts = [
            self._small_parts(trees, top, reports[owner], weights)
            for top, owner in enumerate(trees.owners)
        ]
        root = trees.add_up(parts, add_nodes)
        present = torch.cat([report.present for report in reports]).any(0).tolist()
        device = self._home.device.torch_device
        for i, gradient in self._flats.views([total.to(device) for total in totals]):
            root.gradients[i] = gradient if present[i] else None
        rows = [row for report in reports for row in report.leaves.tolist()]
        return {shard: (total, count) for shard, (total, count) in enumerate(rows)}, root

    def tell(self, place: Place, verdict: Verdict, story: str) -> None:
        """Take part in a step that this process can't complete.

        Raises:
            PeerError: another process failed too.
        """
        _heed(self._gather(Report(verdict, place, story)), self.peers, but=self.rank)

    def close(self) -> None:
        """End what works beside the lanes."""
        self._dense.close()

    def leave(self, story: str) -> None:
        """Let the others know that this process takes no further step; don't wait for them."""
        self.peers.leave(story)

    def by_the_first(self, function: Callable[[], Path]) -> Path:
        """Have the first process call `function`; return everywhere what it returns.

        Raises:
            the error of the call; elsewhere SaveError.
        """
        error: Exception | None = None
        answer = {"path": "", "error": ""}
        if self.rank == 0:
            try:
                answer["path"] = str(function())
            except Exception as caught:
                error = caught
                answer["error"] = str(caught) or repr(caught)
        told = self.peers.gather(json.dumps(answer).encode(), "the checkpoint")[0]
        answer = json.loads(told)
        if error is not None:
            raise error
        if answer["error"]:
            raise SaveError(answer["error"])
        return Path(answer["path"])

    def pairs_of_all(
        self, run: range, found: Mapping[int, Pairs], metrics: Iterable[str]
    ) -> dict[int, Pairs]:
        """Return each metric's (total, count) of all shards from those of this process's."""
        names = list(metrics)
        own = [[found[shard][name] for name in names] for shard in run]
        numbers = [[[float(total), float(count)] for total, count in pairs] for pairs in own]
        values = torch.tensor(numbers, dtype=torch.float64).reshape(-1, len(names), 2)
        told = self.peers.gather(save({"pairs": values}), "the metrics of a batch")
        rows = [row for message in told for row in load(message)["pairs"].tolist()]
        return {
            shard: {name: (total, count) for name, (total, count) in zip(names, row, strict=True)}
            for shard, row in enumerate(rows)
        }

    def outputs_of_all(self, own: Sequence[Batch]) -> list[Batch]:
        """Return the outputs of all shards from those of this process's, in their order."""
        plain, tensors = encode(list(own))
        shape = torch.tensor([*json.dumps(plain).encode()], dtype=torch.uint8)
        told = self.peers.gather(save({**tensors, _SHAPE: shape}), "the outputs of a batch")
        outputs: list[Batch] = []
        for message in told:
            named = load(message)
            plain = json.loads(bytes(named.pop(_SHAPE).tolist()))
            outputs += decode(plain, named.__getitem__)
        return outputs

    def _follow_home(self) -> None:
        """Take the user's module as it is now: its parameters' places, and which may be sparse."""
        self._home = home = self._replicas.home
        self._loose, flats = _loose_parameters(home.module), self._flats
        self._flats = _places_of(home, self._loose)
        if not self._flats.is_like(flats):  # a hook may have been added in this process alone
            self._dense.close()
            self._dense = dense_sum(self.peers, self._flats, on_cpus=self._replicas.on_cpus)

    def _gather(self, report: Report) -> list[Report]:
        messages = self.peers.gather(report.encoded(), f"its part of step {report.place[0]}")
        return [decoded(message) for message in messages]

    def _small_parts(
        self, trees: Forest, top: int, report: Report, weights: Sequence[int]
    ) -> NodeSum:
        """Return what a report says of a top: its buffers and loose gradients."""
        home, span = self._home, trees.spans[top]
        number = trees.tops_of(trees.owners[top]).index(top)

        def tensor(kind: str, i: int) -> torch.Tensor | None:
            return _unnamed(report.tensors, f"{kind}/{number}/{i}", home.device.torch_device)

        return NodeSum(
            [tensor("gradient", i) for i in range(len(home.parameters))],
            [tensor("buffer", i) for i in range(len(home.buffers))],
            tuple(weights[shard] for shard in span),
            home,
            span.start,
            span.stop,
        )


def _heed(reports: Sequence[Report], peers: Peers, but: int | None = None) -> None:
    """Raise what the other processes say that has to be said."""
    told = [(rank, report) for rank, report in enumerate(reports) if rank != but]
    for rank, report in told:
        if report.verdict is Verdict.FAILED:
            failed = f"rank {rank} (on {peers.hosts[rank]}) failed: {report.story}"
            raise PeerError(failed, rank, reported=True)
    for rank, report in told:
        if report.verdict is Verdict.AGAIN:
            raise AgainError(f"rank {rank} asks for step {report.place[0]} to be done again")
    own = reports[peers.rank].place
    for rank, report in told:
        if report.place != own:
            raise PeerError(
                f"rank {peers.rank} is at {_spelled(own)}, but rank {rank} (on "
                f"{peers.hosts[rank]}) is at {_spelled(report.place)}: every process must take the "
                f"same steps of the same batches",
                rank,
            )
    _refuse_mixed(reports, peers)


def _refuse_mixed(reports: Sequence[Report], peers: Peers) -> None:
    """Refuse a step some shards of which are compiled and others not."""
    ways = {report.way: rank for rank, report in enumerate(reports)}
    if Way.EAGER in ways and Way.COMPILED in ways:
        rank = ways[Way.EAGER]
        raise PeerError(
            f"rank {rank} (on {peers.hosts[rank]}) can't compile its shards, though others can, "
            f"and says why: make it compile, or leave hybridize out",
            rank,
        )


def _spelled(place: Place) -> str:
    step, epoch, batch, examples, *ends = place
    runs = ", ".join(map(str, ends))
    return f"step {step} (epoch {epoch}, batch {batch}, {examples} examples, runs end at {runs})"


def _loose_parameters(model: nn.Module) -> frozenset[int]:
    """Return the numbers of the parameters of layers that may have sparse gradients."""
    numbers = {parameter: i for i, parameter in enumerate(model.parameters())}
    return frozenset(
        numbers[parameter]
        for child in model.modules()
        if getattr(child, "sparse", False)
        for parameter in child.parameters(recurse=False)
    )


def _places_of(home: Replica, loose: frozenset[int]) -> FlatSpace:
    """Lay gradients out about in the order in which a backward pass makes them final."""
    dense = [i for i in reversed(range(len(home.parameters))) if i not in loose]
    return FlatSpace(home.parameters, dense)


def _named(
    prefix: str, tensors: Iterable[tuple[int, torch.Tensor | None]]
) -> dict[str, torch.Tensor]:
    """Return tensors by name, in plain memory; a sparse one as its indices and values."""
    named = {}
    for number, tensor in tensors:
        if tensor is not None and tensor.is_sparse:
            named[f"{prefix}/{number}/indices"] = _plain(tensor.indices())
            named[f"{prefix}/{number}/values"] = _plain(tensor.values())
            named[f"{prefix}/{number}/shape"] = torch.tensor(tensor.shape)
        elif tensor is not None:
            named[f"{prefix}/{number}"] = _plain(tensor)
    return named


def _unnamed(
    tensors: Mapping[str, torch.Tensor], name: str, device: torch.device
) -> torch.Tensor | None:
    """Return what `_named` has put under `name`."""
    if name in tensors:
        return tensors[name].to(device)
    if f"{name}/indices" not in tensors:
        return None
    indices, values = tensors[f"{name}/indices"], tensors[f"{name}/values"]
    size = tensors[f"{name}/shape"].tolist()
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=True).to(device)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
