"""Reduces a step: how the partial sums of its shards become the root of the canonical tree.

In a single process the root is the tree's only partial sum. Of several processes, each adds up the
nodes inside its run of shards, and sends the others a report and its dense gradients. The result is
the same in every process, and the same as in a single one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from evenstep.batch import ProcessAssignment
from evenstep.collectives import Forest, TreeSum, forest, tree_plan
from evenstep.distributed import Exchange, Peers, refuse_wrong_sums
from evenstep.distributed.accelerators.backend import BackendCollectives
from evenstep.distributed.accelerators.opening import open_collectives
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import GradientReduction, NetworkReducer
from evenstep.distributed.machines.reduce import gradient_reducer
from evenstep.distributed.step_report import (
    AgainError,
    Kind,
    Report,
    Verdict,
    are_no_parts,
    check_reports,
    decoded,
    named,
    unnamed,
)
from evenstep.engine import streams
from evenstep.errors import PeerError, text_of
from evenstep.replicas import Replicas
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.gradients import GradientStream, sparse_error
from evenstep.shard.partial_sum import Add, PartialSum, add, densify, receive
from evenstep.steps.outputs import pack_outputs, unpack_outputs
from evenstep.steps.step import Attempt, Step

logger = logging.getLogger("evenstep")

_OUTPUT = "output/"


class LocalReducer:
    """Reduces steps inside a single process."""

    def begin(self, attempt: Attempt, add: Add, *, may_stream: bool) -> GradientStream | None:
        """Give an attempt its tree; return what takes gradients during backward passes, if any."""
        cut = attempt.cut
        attempt.sum.tree = TreeSum(tree_plan(len(cut.bounds), cut.filled), add)
        return None

    def reduce(self, step: Step) -> tuple[Sequence[Leaf | None], PartialSum]:
        """Return every shard's (total, count), and the root, when all own shards are done."""
        attempt = step.attempt
        assert attempt.sum.tree is not None
        (root,) = attempt.sum.tree.take_partials()
        if root.tables:
            densify(root)
        return [*map(attempt.work.results.get, range(len(attempt.cut.bounds)))], root

    def announce_retry(self, step: Step) -> None:
        """Have all processes attempt the step again, unless they know already."""

    def announce_failure(self, step: Step, error: BaseException) -> None:
        """Have all processes give the step up, unless they know already."""

    def leave(self, error: BaseException) -> None:
        """Tell the other processes why this one takes no further step; don't wait for them."""


class ProcessReducer(LocalReducer):
    """Reduces a step's partial sums over several processes.

    Args:
        peers: the processes.
        replicas: the replicas of the model in this process.
        speeds: each process's speed relative to the others, until speeds are measured.
        own_speed: returns how many shards a second this process computes; 0 while unknown.
        in_flight: how many steps may be submitted and not finished, in any of the processes.
        refuse_failed: refuses what accelerators of this process have computed if one has failed.
        on_cpus: whether all processes compute on CPUs only.

    Attributes:
        peers: the processes.
        in_flight: as given.
        assignment: which process computes which shards.
        stop_asked: whether this process was asked to stop.
        stop_seen: the first step in which some process was asked to stop; None so far.
    """

    def __init__(
        self,
        peers: Peers,
        replicas: Replicas,
        speeds: Sequence[float],
        own_speed: Callable[[], float],
        in_flight: int,
        refuse_failed: Callable[[], None],
        *,
        on_cpus: bool,
    ) -> None:
        self.peers = peers
        self.in_flight = in_flight
        self._refuse_failed = refuse_failed
        self._on_cpus = on_cpus
        self._replicas = replicas
        self._own_speed = own_speed
        self.assignment = ProcessAssignment(speeds, in_flight)
        self.stop_asked = False
        self.stop_seen: int | None = None
        self._home = replicas.home
        self._sparse = sparse_parameters(self._home.module)
        self._collectives: BackendCollectives | None = None
        self._flats: FlatSpace
        self._dense: NetworkReducer
        self._lay_out()

    sums_everywhere = True
    """Whether every process gets the sum of every gradient."""

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.peers.rank

    # ---- the reducer

    def prepare(self, shards: int) -> None:
        """Try the exchange, and share memory for the first step's sums; all must call this method.

        Raises:
            WrongSumError: the exchange adds up known numbers wrongly.
        """
        call = "the `with` that opens the trainer"
        if self.sums_everywhere and not self._on_cpus:
            self._collectives = open_collectives(self.peers, self._home.device, call)
            self._lay_out()
        refuse_wrong_sums(self.peers, self._reducer_of, call)
        runs = self.assignment.runs(shards, 0)
        self._dense.reserve(forest(shards, shards, runs), 0)

    def begin(self, attempt: Attempt, add: Add, *, may_stream: bool) -> GradientStream | None:
        """Give an attempt its tree; return what takes gradients during backward passes, if any."""
        self.note(f"computing its shards of step {attempt.number}")
        if self._home is not self._replicas.home:
            self._follow_home()
        trees = attempt.trees
        plan = trees.plans[self.rank]
        attempt.sum.tree = TreeSum(plan, add)
        attempt.sum.sending = self._dense.begin(trees, len(self._home.parameters), attempt.number)
        gains = self._may_overlap and len(attempt.sum.sending.buckets) > 1
        return GradientStream(plan, attempt.sum.sending) if may_stream and gains else None

    def reduce(self, step: Step) -> tuple[Sequence[Leaf | None], PartialSum]:
        """Bring a step's parts together; called by every process, in a lane.

        Returns:
            Every shard's (total, count), and the root of the tree.

        Raises:
            ModelError: a gradient that can't be sent.
            AgainError: a process asks for another attempt at the step.
            DeviceLostError: an accelerator has failed, so what this process added up is worthless.
            PeerError: a process failed, is late, or is at a different step.
        """
        attempt = step.attempt
        assert attempt.sum.tree is not None
        partials = attempt.sum.tree.take_partials()
        streams.finish(partial.fence for partial in partials)  # before they are copied to the host
        report = self._report(step, partials)
        self._refuse_failed()
        self.note(f"exchanging step {step.number}")
        attempt.ending.reported = True
        began_s = time.perf_counter()
        try:
            combined = self._combine(attempt, report)
            attempt.sum.sending = None  # a kept loss must not keep the gradients alive
            return combined
        finally:
            attempt.clock.exchange_s = time.perf_counter() - began_s
            self.note(f"done with step {step.number}")

    def announce_retry(self, step: Step) -> None:
        """Have all processes attempt the step again, unless they know already."""
        with contextlib.suppress(AgainError):
            self._announce(step, Verdict.AGAIN, "")
        self._drop_gradients(step)

    def announce_failure(self, step: Step, error: BaseException) -> None:
        """Have all processes give the step up, unless they know already."""
        with contextlib.suppress(PeerError, AgainError):  # this error came first
            self._announce(step, Verdict.FAILED, _spelled_error(error))
            self._drop_gradients(step)

    def leave(self, error: BaseException) -> None:
        """Tell the other processes why this one takes no further step; don't wait for them."""
        self.peers.leave(_spelled_error(error))

    def _announce(self, step: Step, verdict: Verdict, story: str) -> None:
        if not step.attempt.ending.reported:
            step.attempt.ending.reported = True
            report = Report(verdict, step.facts, story)
            check_reports(self._gather(report), self.peers, but=self.rank)

    def _drop_gradients(self, step: Step) -> None:
        """Send what the other processes wait for, although the step is not taken."""
        if step.attempt.sum.sending is not None:
            step.attempt.sum.sending.drop()

    # ---- this process's report, and what follows from all reports

    def _report(self, step: Step, partials: Sequence[PartialSum]) -> Report:
        """Return this process's part of a step, as the other processes need it."""
        attempt = step.attempt
        assert attempt.sum.sending is not None
        for partial in partials:
            if partial.is_dense:
                continue
            for i, gradient in enumerate(partial.gradients):
                is_sparse = gradient is not None and gradient.is_sparse
                if is_sparse and i not in self._sparse and i not in partial.tables:
                    raise sparse_error(self._home, i)
        for partial in partials:  # their memory is freed while it is copied
            if partial.fence is not None:
                receive(partial, self._home.device)
        attempt.sum.sending.write_rest([partial.gradients for partial in partials])
        leaves = [attempt.work.results[shard] for shard in attempt.trees.runs[self.rank]]
        kind = Kind.COMPILED if attempt.work.programs else Kind.EAGER
        return Report(
            Verdict.DONE,
            step.facts,
            stop=self.stop_asked,
            kind=kind if leaves else Kind.NONE,
            digest=step.digest,
            speed=self._own_speed(),
            leaves=[(float(leaf[0]), float(leaf[1])) for leaf in leaves],
            present=self._present(attempt.sum.sending, partials),
            tensors={**self._small_tensors(partials), **_outputs_by_name(leaves)},
        )

    def _present(self, sending: GradientReduction, partials: Sequence[PartialSum]) -> list[bytes]:
        """Return which gradients each partial sum has, as in `Report`."""
        for present, partial in zip(sending.present, partials, strict=True):
            for i in self._sparse:
                present[i] = partial.gradients[i] is not None
        return [*map(bytes, sending.present)]

    def _small_tensors(self, partials: Sequence[PartialSum]) -> dict[str, torch.Tensor]:
        """Return the partial sums' buffers and gradients that may be sparse, by name."""
        tensors: dict[str, torch.Tensor] = {}
        if not self._sparse and not self._home.buffers:
            return tensors
        for number, partial in enumerate(partials):
            sparse = [(i, partial.gradients[i]) for i in self._sparse]
            tensors |= named(f"buffer/{number}", enumerate(partial.buffers))
            tensors |= named(f"gradient/{number}", sparse)
        return tensors

    def _combine(
        self, attempt: Attempt, report: Report
    ) -> tuple[Sequence[Leaf | None], PartialSum]:
        trees, sending, step = attempt.trees, attempt.sum.sending, attempt.number
        assert sending is not None
        reports = self._gather(report)
        check_reports(reports, self.peers)
        if self.rank == 0 and are_no_parts(reports):
            logger.warning(
                "in step %d all processes gave the same examples, inside a loop over trainer.epoch "
                "that gives each its part of a batch: they are taken for its part, and so for "
                "different ones with a different number of processes. For whole batches of your "
                "own there, loop over trainer.epoch(loader, whole=True)",
                step,
            )
        self.assignment.record_speeds(step, [other.speed for other in reports])
        if self.stop_seen is None and any(report.stop for report in reports):
            self.stop_seen = step
        device = self._home.device.torch_device
        try:
            gradients = sending.gradients(device)
            self._dense.reserve(trees, step + self.in_flight)
        except PeerError as error:
            exchange = Exchange("step", "the gradients", step)
            raise self.peers.explained(error, exchange) from None
        root = self._small_root(trees, reports, attempt.cut.weights)
        present = _any_of([one for report in reports for one in report.present])
        root.present = present
        for i, gradient in gradients:
            root.gradients[i] = gradient if present[i] else None
        leaves = [leaf for report in reports for leaf in _leaves_of(report)]
        return [*leaves, *[None] * (len(attempt.cut.bounds) - len(leaves))], root

    # ---- the parts of the methods above

    def note(self, doing: str) -> None:
        """Publish what this process is doing, for processes that wait for it."""
        self.peers.status_board.note(doing)

    def close(self) -> None:
        """Stop what sends gradients."""
        self._dense.close()
        if self._collectives is not None:
            self._collectives.close()

    def _lay_out(self) -> None:
        """Choose where gradients lie and how they are reduced."""
        self._flats = FlatSpace(self._home.parameters, self._dense_numbers())
        self._dense = self._reducer_of(self._flats)

    def _reducer_of(self, flats: FlatSpace) -> NetworkReducer:
        """Return what sums gradients that have these places."""
        return gradient_reducer(
            self.peers, flats, on_cpus=self._on_cpus, collectives=self._collectives
        )

    @property
    def _may_overlap(self) -> bool:
        """Whether gradients may be sent during backward passes.

        Of accelerators, those of one lane may: several would need an event for each gradient.
        """
        one_lane = self._collectives is not None and self._replicas.all == [self._home]
        return self._replicas.on_cpus or one_lane

    def _dense_numbers(self) -> list[int]:
        """Order dense gradients roughly as a backward pass makes them final."""
        return [i for i in reversed(range(len(self._home.parameters))) if i not in self._sparse]

    def _follow_home(self) -> None:
        """Follow a change of the user's module: its parameters, and which may be sparse."""
        self._home = self._replicas.home
        self._sparse = sparse_parameters(self._home.module)
        flats = FlatSpace(self._home.parameters, self._dense_numbers())
        if not flats.is_like(self._flats):  # a hook may have been added in this process alone
            self._dense.close()
            self._lay_out()

    def _gather(self, report: Report) -> list[Report]:
        exchange = Exchange("step", "its part", report.facts[0])
        messages = self.peers.gather(report.encoded(), exchange)
        return [
            report if rank == self.rank and not report.tensors else decoded(message)
            for rank, message in enumerate(messages)
        ]

    def _small_root(
        self, trees: Forest, reports: Sequence[Report], weights: Sequence[int]
    ) -> PartialSum:
        """Return the root, with its buffers and its gradients that may be sparse."""
        if not any(report.tensors for report in reports):
            return self._small_part(range(trees.spans[0].start, trees.spans[-1].stop), weights)
        parts = []
        for rank, report in enumerate(reports):
            for number, partial in enumerate(trees.partials_of(rank)):
                parts.append(self._small_part(trees.spans[partial], weights, number, report))
        return trees.add_up(parts, add)

    def _small_part(
        self, span: range, weights: Sequence[int], number: int = 0, report: Report | None = None
    ) -> PartialSum:
        """Return what a report has of a partial sum of some shards, besides dense gradients."""
        home = self._home

        def tensors(kind: str, count: int) -> list[torch.Tensor | None]:
            if report is None:
                return [None] * count
            names = [f"{kind}/{number}/{i}" for i in range(count)]
            return [unnamed(report.tensors, name, home.device.torch_device) for name in names]

        return PartialSum(
            tensors("gradient", len(home.parameters)),
            tensors("buffer", len(home.buffers)),
            tuple(weights[shard] for shard in span),
            home,
            span.start,
            span.stop,
        )


def _outputs_by_name(leaves: Sequence[Leaf]) -> dict[str, torch.Tensor]:
    """Return the outputs of shards as tensors by name; none where no shard has any."""
    outputs = [leaf[2] if len(leaf) > 2 else {} for leaf in leaves]
    packed = pack_outputs(outputs) if any(len(leaf) > 2 for leaf in leaves) else {}
    return {f"{_OUTPUT}{name}": tensor for name, tensor in packed.items()}


def _leaves_of(report: Report) -> list[Leaf]:
    """Return what the shards of a process gave, in their order."""
    pairs = [*report.leaves]
    named = {
        name.removeprefix(_OUTPUT): tensor
        for name, tensor in report.tensors.items()
        if name.startswith(_OUTPUT)
    }
    if not named:
        return [*pairs]
    return [(*pair, one) for pair, one in zip(pairs, unpack_outputs(named), strict=True)]


def _any_of(rows: Sequence[bytes]) -> list[bool]:
    """Return for each parameter whether one of the partial sums has its gradient."""
    either = functools.reduce(operator.or_, (int.from_bytes(row, "little") for row in rows))
    return [*map(bool, either.to_bytes(len(rows[0]), "little"))]


def _spelled_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def sparse_parameters(model: nn.Module) -> frozenset[int]:
    """Return the numbers of the parameters of layers that may have sparse gradients."""
    numbers = {parameter: i for i, parameter in enumerate(model.parameters())}
    return frozenset(
        numbers[parameter]
        for child in model.modules()
        if getattr(child, "sparse", False)
        for parameter in child.parameters(recurse=False)
    )
