"""The trainer: the user's model and optimizer, stepped on every device.

A step is the recipe of Dive into Deep Learning, "Training on Multiple GPUs" (`train_batch`): split
the batch, compute losses and gradients side by side, sum them, update; here over shards instead of
devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep import fingerprint as fingerprints
from evenstep import state
from evenstep.allocator import kept_memory
from evenstep.checkpoint import read_checkpoint, write_checkpoint
from evenstep.compute import Leaf, NodeSum, closing_buffers, divide_gradients
from evenstep.data.loader import Loader
from evenstep.data.order import Cursor
from evenstep.devices import (
    Device,
    Devices,
    deterministic_kernels,
    find_devices,
    intra_op_threads,
    layout_notes,
)
from evenstep.engine.forkjoin import ForkJoinHandle as Handle
from evenstep.engine.forkjoin import Lanes, Task, ThreadLanes
from evenstep.errors import BatchError, ClosedError, InputError, NonFiniteLossError
from evenstep.evaluation import Metric, evaluation_mode, measure_model, measure_output
from evenstep.experiment import Experiment, MemoryFormat, Precision
from evenstep.objective import Loss, UserObjective, choose_objective
from evenstep.replicas import Replicas, broadcast, check_trainable, move_home
from evenstep.rng import derive_seed, shard_seed
from evenstep.runner import ShardRunner, refuse_lonely_batch_norm, sum_floats
from evenstep.sharding import Batch, Cut, shard_bounds

logger = logging.getLogger("evenstep")


class Trainer:
    """Trains a model on many devices with a result that does not depend on how many there are.

    Used with `with`, which starts and stops a lane (a thread) for each device. The module and the
    optimizer stay the user's own and are used as they are: read, change, save them between steps,
    and step any scheduler after `step`.

    Args:
        model: any `nn.Module`; it is moved to the first device.
        optimizer: any `torch.optim` optimizer over parameters of `model`.
        loss: `loss(output, *targets)`, mean-reduced, for batches `(input, *targets)`.
        objective: instead of `loss`: `objective(model, *batch) -> (total, count)`, for everything
            else. It must call the `model` that it is given.
        devices: "auto", a number, or names such as ["cpu:0", "cpu:1"] (see `find_devices`).
        shards: V, how many shards every minibatch is cut into; part of the experiment.
        seed: of the random ops in the model; part of the experiment.
        precision: "fp32", or "bf16" for autocast; part of the experiment.
        memory_format: "auto" (a fixed rule), "contiguous" or "channels_last".
        threads: intra-op threads for each device; part of the experiment.
        before_update: called with the module between sum and update, when each `parameter.grad`
            holds the mean gradient of the batch: the place for clipping.
        scheduler: saved and resumed with the rest; stepping it stays with the user.
        max_in_flight: steps that may be unfinished when `step` returns; 1: a returned step is
            finished.
        lanes: what runs the work; `InlineLanes` does without threads.

    Attributes:
        cursor: the place in the data, (epoch, step): the next batch is number `step` of `epoch`.
        steps_done: steps since the start of the training, over all epochs and resumes.
        notes: lines about the devices that a person should know; logged when `with` opens.
        on_shard: for debugging: called in the lanes as `on_shard(shard, value)` with every
            shard's own gradients and buffers, before anything is added to them.

    Raises:
        InputError: (its subclasses) for what can't be trained, before anything was changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        *,
        objective: UserObjective | None = None,
        devices: Devices = "auto",
        shards: int = 8,
        seed: int = 0,
        precision: Precision = "fp32",
        memory_format: MemoryFormat = "auto",
        threads: int = 1,
        before_update: Callable[[nn.Module], object] | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        max_in_flight: int = 1,
        lanes: Callable[[Sequence[Device]], Lanes] = ThreadLanes,
    ) -> None:
        experiment = Experiment(
            shards=shards,
            seed=seed,
            precision=precision,
            memory_format=memory_format,
            threads=threads,
        )
        if max_in_flight != 1:
            raise InputError(f"got max_in_flight={max_in_flight}: only 1 is possible so far")
        self.devices = find_devices(devices, threads=threads)
        self._objective = choose_objective(loss, objective)
        self._measure = measure_model if loss is None else measure_output
        check_trainable(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.experiment = experiment.resolved_for(model, self.devices[0].kind)
        self.notes = layout_notes(self.devices, shards)
        self.cursor = Cursor(0, 0)
        self.steps_done = 0
        self._before_update = before_update
        self.on_shard: Callable[[int, NodeSum], None] | None = None
        self._make_lanes = lanes
        self._lanes: Lanes | None = None
        self._opened = contextlib.ExitStack()
        channels_last = self.experiment.memory_format == "channels_last"
        move_home(model, optimizer, self.devices[0], channels_last=channels_last)
        self._replicas = Replicas(model, self.devices)
        self._runner = ShardRunner(self.experiment, self._replicas)

    def __enter__(self) -> Trainer:
        """Start the lanes."""
        for note in self.notes:
            logger.warning(note)
        self._opened.enter_context(kept_memory())
        self._opened.enter_context(deterministic_kernels(self.devices))
        self._lanes = self._opened.enter_context(self._make_lanes(self.devices))
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the lanes; the model stays usable."""
        self._lanes = None
        self._opened.close()

    def step(self, *batch: Batch) -> Handle:
        """Train on one minibatch: split, compute the shards, sum, update.

        Args:
            batch: tensors, or nestings of tuples, lists and dicts of tensors, examples first.

        Returns:
            A handle of the batch's mean loss (before the update).

        Raises:
            BatchError: the batch can't be cut into shards.
            NonFiniteLossError: a shard's loss is NaN or infinite. As after every error before the
                update, and Ctrl-C, the model is as the step found it.
        """
        cut = self._runner.split(batch)
        steps_before = self.steps_done
        self._open_step()
        try:
            if isinstance(self.optimizer, torch.optim.LBFGS):
                loss = self._minimise(cut)
            else:
                loss, count, root = self._sum_shards(cut)
                self._run(self._update, count, root)
        except BaseException:
            if self.steps_done == steps_before:
                self._replicas.abandon_step()
            raise
        return Handle(loss)

    def epoch(self, loader: Loader) -> Iterator[Batch]:
        """Yield what is left of the current epoch's batches; then the next epoch begins.

        Raises:
            BatchError: the epoch's last batch can't be trained on; said before its first.
        """
        last = loader.epoch_examples - (len(loader) - 1) * loader.batch_size
        refuse_lonely_batch_norm(self.model, shard_bounds(last, self.experiment.shards))
        yield from loader.epoch(self.cursor)
        self.cursor = Cursor(self.cursor.epoch + 1, 0)

    def evaluate(self, batches: Iterable[Batch], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Return each metric over all `batches`, computed on every device in evaluation mode.

        Args:
            batches: each what `step` gets: a tuple or list of its arguments, or its one argument.
            metrics: name to `metric(output, *targets) -> (total, count)`; a trainer with an
                objective calls `metric(model, *batch)`.

        Raises:
            BatchError: there is no batch, or none that counts.
        """
        sums = dict.fromkeys(metrics, (0.0, 0.0))
        with evaluation_mode(self.model):
            for number, batch in enumerate(batches):
                for name, (total, count) in self._measure_batch(number, batch, metrics).items():
                    sums[name] = (sums[name][0] + total, sums[name][1] + count)
        if any(count == 0 for _, count in sums.values()):
            raise BatchError("evaluate counted no examples: give at least one batch")
        return {name: total / count for name, (total, count) in sums.items()}

    def waitall(self) -> None:
        """Wait for every step; afterwards the model may be read, and changed in any way."""
        self._replicas.mark_touched()

    def fingerprint(self) -> str:
        """Return the SHA-256 of parameters, buffers and optimizer state (hexadecimal)."""
        return fingerprints.fingerprint(self.model, self.optimizer)

    def save(self, folder: str | Path, *, keep: int = 3) -> Path:
        """Save everything that training goes on from, in a new folder `step-…` in `folder`.

        Args:
            folder: where this run's checkpoints lie; made if it isn't there.
            keep: how many of them are kept, the newest ones.

        Raises:
            SaveError: it can't be written; the checkpoints before it are whole.
        """
        tree = {
            "experiment": dataclasses.asdict(self.experiment),
            "cursor": dataclasses.asdict(self.cursor),
            "steps_done": self.steps_done,
            "draws_random": self._runner.watch.draws,
            "model": state.model_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "fingerprint": self.fingerprint(),
        }
        return write_checkpoint(Path(folder), tree, step=self.steps_done, keep=keep)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        **options: Any,
    ) -> Trainer:
        """Return a trainer that goes on where a saved one stopped, bit for bit, on any devices.

        Args:
            folder: a folder of checkpoints (the newest counts), or one checkpoint.
            model: built as the saved one was; its values are overwritten.
            optimizer: likewise.
            loss: as for `Trainer`.
            options: as for `Trainer`. Shards, seed, precision, memory format and threads are the
                checkpoint's; others are refused.

        Raises:
            CheckpointError: missing, damaged, or of another model, optimizer or experiment.
        """
        saved = read_checkpoint(Path(folder))
        state.check_is_training_state(saved, Path(folder))
        trainer = cls(model, optimizer, loss, **{**saved["experiment"], **options})
        trainer._restore(saved)
        return trainer

    @property
    def busy_s(self) -> list[float]:
        """For each device, the seconds in which its lane had work since `with` opened it."""
        return list(self._lanes.busy_s) if self._lanes else [0.0] * len(self.devices)

    def _open_step(self) -> None:
        """Let every replica start from the user's model as it is now."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise InputError(
                "torch.autocast around a step has no hold in the lanes: use "
                'Trainer(precision="bf16") instead'
            )
        if self._replicas.follow_home():
            self._run(self._bring_copies_up_to_date)
        self._replicas.open_step()

    def _measure_batch(
        self, number: int, batch: Batch, metrics: Mapping[str, Metric]
    ) -> dict[str, tuple[float, float]]:
        cut = self._runner.split(_as_arguments(batch))
        seed_of = functools.partial(derive_seed, "evaluation", self.experiment.seed, number)
        self._open_step()
        try:
            return self._runner.measure(self._open_lanes(), cut, self._measure, metrics, seed_of)
        finally:
            self._replicas.restore_opening()

    def _sum_shards(self, cut: Cut) -> tuple[float, float, NodeSum]:
        """Compute every shard; return the mean loss, its count, and the sum over the shards."""
        cursor = self.cursor
        seed_of = functools.partial(shard_seed, self.experiment.seed, cursor.epoch, cursor.step)
        leaves, root = self._runner.train(
            self._open_lanes(), cut, self._objective, seed_of, self.on_shard
        )
        self._refuse_non_finite(cut, leaves)
        count = sum_floats([leaf and leaf[1] for leaf in leaves])
        if count == 0:
            raise NonFiniteLossError(
                f"step {self.steps_done} counts nothing (is every target ignored?), so its mean "
                f"loss is 0/0: the step was not taken"
            )
        return sum_floats([leaf and leaf[0] for leaf in leaves]) / count, count, root

    def _install(self, count: float, root: NodeSum) -> None:
        """Put the mean gradients where the optimizer looks, and let the user's hook see them."""
        divide_gradients(root.gradients, count)
        for parameter, gradient in zip(self._replicas.home.parameters, root.gradients, strict=True):
            parameter.grad = gradient
        if self._before_update:
            self._before_update(self.model)

    def _update(self, count: float, root: NodeSum) -> None:
        self._install(count, root)
        self.optimizer.step()
        self._close_step(root)

    def _minimise(self, cut: Cut) -> float:
        """Update with an optimizer that evaluates the batch as often as it likes (LBFGS).

        Its own arithmetic runs in the caller's thread, with the devices' number of threads. It
        writes parameters between evaluations, and wants gradients that can be viewed as flat.
        """
        losses: list[float] = []
        roots: list[NodeSum] = []

        def closure() -> float:
            if self._replicas.follow_home():
                self._run(self._bring_copies_up_to_date)
            loss, count, root = self._sum_shards(cut)
            root.gradients = [g if g is None else g.contiguous() for g in root.gradients]
            self._install(count, root)
            losses.append(loss)
            roots[:] = [root]
            return loss

        with (
            state.rolled_back_on_error(self.model, self.optimizer),
            intra_op_threads(self.experiment.threads),
        ):
            self.optimizer.step(closure)
        self._close_step(roots[0])
        return losses[0]

    def _close_step(self, root: NodeSum) -> None:
        self._replicas.close_step(closing_buffers(root))
        self._bring_copies_up_to_date()
        self.cursor = Cursor(self.cursor.epoch, self.cursor.step + 1)
        self.steps_done += 1

    def _bring_copies_up_to_date(self) -> None:
        for replica in self._replicas.copies:
            broadcast(self._replicas.home, replica)
        self._replicas.mark_synchronised()

    def _refuse_non_finite(self, cut: Cut, leaves: Sequence[Leaf | None]) -> None:
        for shard, leaf in enumerate(leaves):
            if leaf is not None and not math.isfinite(float(leaf[0])):
                lo, hi = cut.bounds[shard]
                raise NonFiniteLossError(
                    f"the loss of shard {shard} (examples {lo} to {hi - 1} of the batch) in step "
                    f"{self.steps_done} (epoch {self.cursor.epoch}, batch {self.cursor.step}) is "
                    f"{float(leaf[0])}: the step was not taken. Try a lower learning rate, clip "
                    f"gradients in before_update, or look at those examples"
                )

    def _restore(self, saved: Mapping[str, Any]) -> None:
        state.check_experiment(self.experiment, saved["experiment"])
        state.restore_model(self.model, saved["model"])
        state.restore_optimizer(self.optimizer, saved["optimizer"])
        state.restore_scheduler(self.scheduler, saved["scheduler"])
        self.cursor = Cursor(**saved["cursor"])
        self.steps_done = saved["steps_done"]
        self._runner.watch.draws = saved["draws_random"]
        state.check_fingerprint(self.fingerprint(), saved["fingerprint"])

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run `function` in the first device's lane, where the update is done."""
        self._open_lanes().run([Task(0, function, arguments)])

    def _open_lanes(self) -> Lanes:
        if self._lanes is None:
            raise ClosedError(
                "the trainer is not open: use it as `with evenstep.Trainer(...) as trainer:`"
            )
        return self._lanes


def _as_arguments(batch: Batch) -> tuple[Batch, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)
