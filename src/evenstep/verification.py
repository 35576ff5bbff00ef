"""Checks that a model's training does not depend on the devices, and finds where it does.

`verify` trains the same steps on several sets of devices and compares the results bit for bit. If
they differ, the first differing step is replayed and recorded, and the gradients and buffers of
each shard are compared before they are summed. A shard is computed alone, on the same numbers. So
a difference shows where the model uses something that evenstep does not control and that the check
of the contract in a training's first step has not seen; the records say in which module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.checkpoint.fingerprint import digests, fingerprint, tensor_digest
from evenstep.comparison import Cause, find_cause, read_run
from evenstep.data import Loader
from evenstep.devices import Devices, find_devices
from evenstep.devices.facts import KINDS, Facts, differences, listed
from evenstep.distributed import local_share
from evenstep.errors import InputError, hides_own_frames, shown
from evenstep.recording import record
from evenstep.shard.partial_sum import PartialSum
from evenstep.shard.targets import call_with
from evenstep.training.trainer import Trainer

MakeTrainer: TypeAlias = Callable[[Devices], Trainer]
Batches: TypeAlias = Loader | Iterable[Batch] | Callable[[Trainer], Iterable[Batch]]

_BEFORE_GRADIENTS = frozenset(
    {
        *(Cause.ORDER, Cause.DATA, Cause.ARGUMENTS, Cause.CALLS),
        *(Cause.MODES, Cause.PRECISION, Cause.LAYER, Cause.DRAWS, Cause.DROPOUT),
        *(Cause.KERNEL, Cause.ROUNDING),
    }
)
"""What two records can say beyond the first shard and tensor: a module, or the examples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutResult:
    """The result of training on one set of devices.

    Attributes:
        devices: names of the devices.
        fingerprints: the fingerprint of the whole training state after each step.
        fingerprints_2: its version 2, which covers the optimizer's settings and the extra state of
            modules too.
    """

    devices: tuple[str, ...]
    fingerprints: tuple[str, ...]
    fingerprints_2: tuple[str, ...]

    @property
    def label(self) -> str:
        """The devices' names in brackets."""
        return f"({', '.join(self.devices)})"

    @property
    def states(self) -> list[tuple[str, str]]:
        """Both fingerprints after each step."""
        return [*zip(self.fingerprints, self.fingerprints_2, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two sets of devices.

    Attributes:
        step: the first step, counted from 0, after which the training states differ.
        layouts: the two sets of devices, as indices into `Verdict.results`.
        shard: the first shard of this step, counted from 0, whose own gradients or buffers differ
            in the replay; None if all shards agree.
        tensor: the first tensor that differs: of the shard ("gradient of fc.weight", "buffer
            bn.running_mean") or, if all shards agree, of the state after the step
            ("parameter/fc.weight", or a setting: "group/0/lr"). None if the replays agree in
            everything.
        repeats: whether both replays reproduced the fingerprints of the first training. If not,
            the results differ even on the same devices.
        seen: what the records of the two replays show of the place where they part: "b (Noisy) has
            the same inputs and different outputs". "" if they show no more than the tensor does.
    """

    step: int
    layouts: tuple[int, int]
    shard: int | None
    tensor: str | None
    repeats: bool
    seen: str = ""

    def __str__(self) -> str:
        shard = "all shards agree" if self.shard is None else f"shard {self.shard}"
        tensor = self.tensor or "no difference in the replay"
        repeats = "" if self.repeats else "; not repeatable"
        seen = f"; {self.seen}" if self.seen else ""
        return f"step {self.step}, {shard}, {tensor}{repeats}{seen}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of `verify`; `str(verdict)` is one line.

    Attributes:
        results: the results on each set of devices, in the order given.
        difference: the first difference; None if all results are identical.
    """

    results: tuple[LayoutResult, ...]
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Whether the training state was bit-identical after every step on all sets of devices."""
        return all(result.states == self.results[0].states for result in self.results)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprint after the last step on each set of devices."""
        return tuple(result.fingerprints[-1] for result in self.results)

    def __str__(self) -> str:
        if self.difference is None:
            steps = len(self.results[0].fingerprints)
            names = self._names(range(len(self.results)))
            return f"identical after each of {steps} steps on {names}"
        return f"{self._names(self.difference.layouts)} differ: {self.difference}"

    def _names(self, layouts: Iterable[int]) -> str:
        return " and ".join(self.results[number].label for number in layouts)


@hides_own_frames
def verify(
    make_trainer: MakeTrainer,
    batches: Batches,
    devices: Sequence[Devices] = (1, 2),
    steps: int = 3,
    *,
    on_result: Callable[[LayoutResult], object] | None = None,
) -> Verdict:
    """Train the same steps on several sets of devices and compare the states after every step.

        def make_trainer(devices):
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return evenstep.Trainer(model, optimizer, loss, devices=devices)

        verdict = evenstep.verify(make_trainer, loader, devices=[1, 2, ["cpu:0", "cpu:1:own"]])
        assert verdict.identical, verdict

    Args:
        make_trainer: takes a set of devices and returns a trainer on them that is not open yet. It
            must create everything anew, model and optimizer too, with the same seeds each time.
        batches: at least `steps` batches, the same in every iteration: a `Loader`, a list, or a
            function that takes the trainer and returns an iterable.
        devices: at least two sets of devices, each in a form that `Trainer` accepts.
        steps: number of steps to train, at least 1.
        on_result: called with the result on each set of devices as soon as it is known.

    Returns:
        A `Verdict`: whether all states were `identical`, the fingerprints, and the first
        `difference` with its step, shard and tensor.

    Raises:
        ContractError: the code breaks the contract of a step; the message names what does.
        InputError: fewer than two sets of devices, no step, or too few batches. Errors of
            `make_trainer` and of the training are raised as they are.
    """
    if isinstance(make_trainer, Trainer | nn.Module) or not callable(make_trainer):
        kind = type(make_trainer).__name__
        raise InputError(
            f"got a {kind} as make_trainer: give a function that takes devices and returns a new "
            f"trainer, such as the one in the help of evenstep.verify"
        )
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        raise InputError(
            f"got devices={shown(devices)}: give a list of the sets of devices to compare, such as "
            f"[1, 2]"
        )
    if len(devices) < 2 or steps < 1:
        raise InputError(
            f"got {len(devices)} sets of devices and steps={steps}: give at least 2 sets to "
            f"compare, and at least 1 step"
        )
    make_trainer = _Maker(make_trainer)
    results: list[LayoutResult] = []
    for layout in devices:
        results.append(_train(make_trainer, batches, layout, steps))
        if on_result:
            on_result(results[-1])
    replay = functools.partial(_replay, make_trainer, batches)
    return Verdict(results=tuple(results), difference=_find_difference(replay, devices, results))


class _Maker:
    """The user's `make_trainer`, refused if it does not make a new trainer on the given devices."""

    def __init__(self, make_trainer: MakeTrainer) -> None:
        self._make_trainer = make_trainer
        self._last: weakref.ref[nn.Module] | None = None
        self._opening = ""  # the fingerprint of the first trainer
        self._facts: Facts = {}  # what it trains

    def __call__(self, devices: Devices) -> Trainer:
        trainer = call_with(lambda: "make_trainer(devices)", self._make_trainer, devices)
        if not isinstance(trainer, Trainer):
            raise InputError(
                f"make_trainer returned {shown(trainer)}: it must return an evenstep.Trainer"
            )
        wanted, found = find_devices(devices, share=local_share()), trainer.devices
        names = [", ".join(device.name for device in some) for some in (wanted, found)]
        if names[0] != names[1]:
            raise InputError(
                f"make_trainer returned a trainer on {names[1]} instead of {names[0]}: give the "
                f"trainer what make_trainer is given, devices=devices"
            )
        opening = fingerprint(trainer.model, trainer.optimizer)
        self._opening = self._opening or opening
        is_the_same = self._last is not None and self._last() is trainer.model
        if is_the_same and opening != self._opening:
            raise InputError(
                "make_trainer returned a trainer of the same model again, which is trained by now: "
                "make model, optimizer and trainer inside make_trainer"
            )
        self._last = weakref.ref(trainer.model)
        self._refuse_another_training(trainer, names[1])
        return trainer

    def _refuse_another_training(self, trainer: Trainer, devices: str) -> None:
        """Refuse a trainer of other facts than the first one's, which depend on the devices."""
        self._facts = self._facts or trainer.facts
        different = [
            one
            for one in differences(self._facts, trainer.facts)
            if KINDS[one.kind].between == "refused" and one.name != "memory_format"
        ]
        if different:
            raise InputError(
                f"make_trainer returned a different training on {devices}: with {listed(different)}"
                f". Nothing but the devices may depend on the devices that it is given"
            )


@dataclasses.dataclass(frozen=True)
class _Replay:
    """Digests of tensors by name: of each shard in a step, and of the state after the step."""

    shards: dict[int, dict[str, str]]
    state: dict[str, str]
    fingerprints: tuple[str, str]


def _train(
    make_trainer: MakeTrainer, batches: Batches, devices: Devices, steps: int
) -> LayoutResult:
    states = []
    with make_trainer(devices) as trainer:
        for batch in _take(steps, batches, trainer):
            trainer.step(*batch)
            states.append(_state_of(trainer))
    names = tuple(device.name for device in trainer.devices)
    first, second = zip(*states, strict=True)
    return LayoutResult(devices=names, fingerprints=first, fingerprints_2=second)


def _state_of(trainer: Trainer) -> tuple[str, str]:
    """Return both fingerprints."""
    return trainer.fingerprint(), trainer.fingerprint(version=2)


def _find_difference(
    replay: Callable[[Devices, int, Path | None], _Replay],
    layouts: Sequence[Devices],
    results: Sequence[LayoutResult],
) -> Difference | None:
    place = _first_differing(results)
    if place is None:
        return None
    step, other = place
    with _scratch() as folder:
        records = {number: folder and folder / str(number) for number in (0, other)}
        replays = [replay(layouts[number], step, path) for number, path in records.items()]
        seen = _first_seen([(results[number].label, path) for number, path in records.items()])
    shard, tensor = _first_tensor(*replays)
    repeats = all(
        again.fingerprints == result.states[step]
        for again, result in zip(replays, (results[0], results[other]), strict=True)
    )
    return Difference(
        step=step, layouts=(0, other), shard=shard, tensor=tensor, repeats=repeats, seen=seen
    )


def _first_differing(results: Sequence[LayoutResult]) -> tuple[int, int] | None:
    """Return the first step after which a result differs from the first one, and its index."""
    by_step = zip(*(result.states for result in results), strict=True)
    for step, states in enumerate(by_step):
        for number, state in enumerate(states):
            if state != states[0]:
                return step, number
    return None


def _replay(
    make_trainer: MakeTrainer, batches: Batches, devices: Devices, step: int, path: Path | None
) -> _Replay:
    """Train up to and including `step`, and record it; return the digests of all in this step."""
    shards: dict[int, dict[str, str]] = {}
    with make_trainer(devices) as trainer:
        gradients = [f"gradient of {name}" for name, _ in trainer.model.named_parameters()]
        buffers = [f"buffer {name}" for name, _ in trainer.model.named_buffers()]

        def observe(shard: int, value: PartialSum) -> None:  # in the lanes, each with other keys
            tensors = (*value.gradients, *value.buffers)
            names = (*gradients, *buffers)
            shards[shard] = {n: _digest(t) for n, t in zip(names, tensors, strict=True)}

        for number, batch in enumerate(_take(step + 1, batches, trainer)):
            trainer.on_shard = observe if number == step else None
            folder = path if number == step else None
            with record(folder, steps=1) if folder else contextlib.nullcontext():
                trainer.step(*batch)
        state = digests(trainer.model, trainer.optimizer)
        return _Replay(shards, state, _state_of(trainer))


@contextlib.contextmanager
def _scratch() -> Iterator[Path | None]:
    """Give a folder that is removed at the end; None where none can be made."""
    try:
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    except OSError:
        yield None
        return
    with folder as path:
        yield Path(path)


def _first_seen(records: Iterable[tuple[str, Path | None]]) -> str:
    """Return where two records of a step part, as a line; "" if that is no module or example."""
    try:
        runs = [
            dataclasses.replace(read_run(path), name=name)
            for name, path in records
            if path is not None
        ]
        if len(runs) < 2:
            return ""
        finding = find_cause(*runs)
    except InputError:  # no room for them, or nothing in them: the tensor says where it is
        return ""
    return finding.evidence[0] if finding.cause in _BEFORE_GRADIENTS else ""


def _first_tensor(ours: _Replay, theirs: _Replay) -> tuple[int | None, str | None]:
    """Return the first shard and its tensor that differ, or else the first tensor of the state."""
    for shard in sorted(ours.shards):
        if tensor := _first_name(ours.shards[shard], theirs.shards.get(shard, {})):
            return shard, tensor
    return None, _first_name(ours.state, theirs.state)


def _first_name(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    names = dict.fromkeys((*ours, *theirs))  # in order, each once
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def _digest(tensor: torch.Tensor | None) -> str:
    return tensor_digest(tensor.to_dense() if tensor is not None and tensor.is_sparse else tensor)


def _take(steps: int, batches: Batches, trainer: Trainer) -> Iterator[Batch]:
    if isinstance(batches, Loader):
        batches = trainer.epoch(batches)
    elif callable(batches):
        batches = batches(trainer)
    elif isinstance(batches, Iterator):
        raise InputError(
            "got batches as an iterator, which ends after one training: give a list, a Loader, or "
            "a function that returns an iterator"
        )
    taken = 0
    for taken, batch in zip(range(1, steps + 1), batches, strict=False):  # noqa: B007
        yield batch
    if taken < steps:
        raise InputError(
            f"got {taken} batches for {steps} steps: give more batches, or take fewer steps"
        )
