"""Does a model keep the promise? Train it on several sets of devices and compare, bit for bit.

Where two sets differ, both are replayed up to the first step that differs, and there every shard's
own gradients and buffers are compared, before anything is added to them. A shard is computed alone,
on the same numbers, so one that differs names the place where the model reaches for something that
evenstep has no hold on: `random`, numpy, the clock, state in Python objects.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from evenstep.batch import Batch
from evenstep.checkpoint.fingerprint import named_state, tensor_digest
from evenstep.devices import Devices
from evenstep.errors import InputError
from evenstep.shard.partial_sum import PartialSum
from evenstep.training.trainer import Trainer

MakeTrainer: TypeAlias = Callable[[Devices], Trainer]
Batches: TypeAlias = Callable[[Trainer], Iterable[Batch]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutRun:
    """One set of devices and what training on it gave.

    Attributes:
        devices: names of the devices.
        fingerprints: of the whole training state after each step.
    """

    devices: tuple[str, ...]
    fingerprints: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two sets of devices went apart.

    Attributes:
        step: the first step (from 0) after which the fingerprints differ.
        layouts: the two that were compared, as indices into `Verdict.runs`.
        shard: in the replay of that step, the first shard whose own values differ; None if all
            shards agree.
        tensor: of that shard ("gradient of fc.weight", "buffer bn.running_mean"), or, where all
            shards agree, of the state after the step ("parameter/fc.weight"); None if the replays
            agree in everything, so that the difference did not come back.
        repeats: whether each replay gave the fingerprint that its layout had given before. If
            not, even the same devices don't give the same result twice.
    """

    step: int
    layouts: tuple[int, int]
    shard: int | None
    tensor: str | None
    repeats: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `verify` found.

    Attributes:
        runs: one for each layout, in the order given.
        difference: None if all runs are identical.
    """

    runs: tuple[LayoutRun, ...]
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Whether the training state was the same, bit for bit, after every step of every run."""
        return len({run.fingerprints for run in self.runs}) == 1

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """For each layout, the fingerprint after the last step."""
        return tuple(run.fingerprints[-1] for run in self.runs)


def verify(
    make_trainer: MakeTrainer,
    batches: Batches,
    layouts: Sequence[Devices],
    steps: int,
    *,
    on_run: Callable[[LayoutRun], object] | None = None,
) -> Verdict:
    """Train the same steps on each of `layouts` and compare the training state after every step.

    Args:
        make_trainer: returns a trainer on the devices it is given, not yet opened. It must build
            everything afresh, model and optimizer too, with the same seeds each time.
        batches: returns the batches for a new trainer, at least `steps` of them; with
            `lambda trainer: trainer.epoch(loader)` they are those of a training run.
        layouts: at least two sets of devices, as `Trainer` takes them.
        steps: how many steps to train, at least 1.
        on_run: called after each layout's run.

    Raises:
        InputError: fewer than two layouts, no step, or too few batches.
    """
    if len(layouts) < 2 or steps < 1:
        raise InputError(
            f"got {len(layouts)} sets of devices and {steps} steps: at least 2 sets are needed to "
            f"compare, and at least 1 step"
        )
    runs: list[LayoutRun] = []
    for devices in layouts:
        runs.append(_run(make_trainer, batches, devices, steps))
        if on_run:
            on_run(runs[-1])
    replay = functools.partial(_replay, make_trainer, batches)
    return Verdict(runs=tuple(runs), difference=_find_difference(replay, layouts, runs))


@dataclasses.dataclass(frozen=True)
class _Replay:
    """Digests of one layout's tensors by name: of each shard in a step, and of the state after."""

    shards: dict[int, dict[str, str]]
    state: dict[str, str]
    fingerprint: str


def _run(make_trainer: MakeTrainer, batches: Batches, devices: Devices, steps: int) -> LayoutRun:
    fingerprints = []
    with make_trainer(devices) as trainer:
        for batch in _exactly(steps, batches(trainer)):
            trainer.step(*batch)
            fingerprints.append(trainer.fingerprint())
    names = tuple(device.name for device in trainer.devices)
    return LayoutRun(devices=names, fingerprints=tuple(fingerprints))


def _find_difference(
    replay: Callable[[Devices, int], _Replay], layouts: Sequence[Devices], runs: Sequence[LayoutRun]
) -> Difference | None:
    place = _first_differing(runs)
    if place is None:
        return None
    step, other = place
    replays = replay(layouts[0], step), replay(layouts[other], step)
    shard, tensor = _first_tensor(*replays)
    repeats = all(
        again.fingerprint == run.fingerprints[step]
        for again, run in zip(replays, (runs[0], runs[other]), strict=True)
    )
    return Difference(step=step, layouts=(0, other), shard=shard, tensor=tensor, repeats=repeats)


def _first_differing(runs: Sequence[LayoutRun]) -> tuple[int, int] | None:
    """Return the first step after which some run differs from the first one, and that run."""
    by_step = zip(*(run.fingerprints for run in runs), strict=True)
    for step, fingerprints in enumerate(by_step):
        for number, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[0]:
                return step, number
    return None


def _replay(make_trainer: MakeTrainer, batches: Batches, devices: Devices, step: int) -> _Replay:
    """Train up to and including `step`, and take the digests of everything in it."""
    shards: dict[int, dict[str, str]] = {}
    with make_trainer(devices) as trainer:
        gradients = [f"gradient of {name}" for name, _ in trainer.model.named_parameters()]
        buffers = [f"buffer {name}" for name, _ in trainer.model.named_buffers()]

        def observe(
            shard: int, value: PartialSum
        ) -> None:  # in the lanes; each shard has its own key
            tensors = (*value.gradients, *value.buffers)
            names = (*gradients, *buffers)
            shards[shard] = {n: _digest(t) for n, t in zip(names, tensors, strict=True)}

        for number, batch in enumerate(_exactly(step + 1, batches(trainer))):
            trainer.on_shard = observe if number == step else None
            trainer.step(*batch)
        state = {
            name: tensor_digest(v) for name, v in named_state(trainer.model, trainer.optimizer)
        }
        return _Replay(shards, state, trainer.fingerprint())


def _first_tensor(ours: _Replay, theirs: _Replay) -> tuple[int | None, str | None]:
    """Name the first shard and tensor, else the first tensor of the state, that differ."""
    for shard in sorted(ours.shards):
        if tensor := _first_name(ours.shards[shard], theirs.shards.get(shard, {})):
            return shard, tensor
    return None, _first_name(ours.state, theirs.state)


def _first_name(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    names = dict.fromkeys((*ours, *theirs))  # in order, each once
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def _digest(tensor: torch.Tensor | None) -> str:
    return tensor_digest(tensor.to_dense() if tensor is not None and tensor.is_sparse else tensor)


def _exactly(steps: int, batches: Iterable[Batch]) -> Iterator[Batch]:
    iterator = iter(batches)
    for number in range(steps):
        try:
            batch = next(iterator)
        except StopIteration:
            raise InputError(
                f"got {number} batches for {steps} steps: give more, or take fewer steps"
            ) from None
        yield batch
