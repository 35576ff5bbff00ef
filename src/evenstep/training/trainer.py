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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import optree
import torch
from torch import nn

from evenstep.batch import Batch, Cut, shard_bounds
from evenstep.batch.rng import derive_seed, shard_seed
from evenstep.checkpoint import fingerprint as fingerprints
from evenstep.checkpoint import training_state
from evenstep.checkpoint.async_writer import Saves, write_state
from evenstep.checkpoint.files import checkpoint_of, read_checkpoint
from evenstep.data import Cursor, Loader
from evenstep.devices import (
    Device,
    Devices,
    deterministic_kernels,
    find_devices,
    intra_op_threads,
    kept_memory,
    layout_notes,
)
from evenstep.distributed import local_share
from evenstep.engine import Engine, Lanes, Pending, ThreadLanes
from evenstep.errors import BatchError, ClosedError, InputError
from evenstep.experiment import BatchNorm, Experiment, MemoryFormat, Precision
from evenstep.profiling.accounting import DeviceShares
from evenstep.profiling.trace import Trace
from evenstep.replicas import OptimizerTwin, Replicas, check_trainable, move_home
from evenstep.shard.compile_policy import Hybridized
from evenstep.shard.evaluation import (
    Forward,
    Metric,
    evaluation_mode,
    measure_model,
    measure_output,
    output_of,
)
from evenstep.shard.forward_backward import NodeSum
from evenstep.shard.loss import Loss, UserObjective, choose_objective
from evenstep.training.clock import Timekeeper
from evenstep.training.executor import ShardRunner, refuse_lonely_batch_norm
from evenstep.training.group import Team
from evenstep.training.pipeline import Flight
from evenstep.training.step import Attempt, SeedOf, StepLoss, StepRun
from evenstep.training.update import Closure, Update

logger = logging.getLogger("evenstep")


class Trainer:
    """Trains a model on many devices with a result that does not depend on how many there are.

    Used with `with`, which starts and stops a lane (a thread) for each device. In a script that
    torchrun starts several times, it also finds the other processes: they train one model together,
    each with devices of its own. The module and the
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
        hybridize: compile a shard's forward and backward pass, on CPUs; part of the experiment. A
            line says what is gained, or why shards are computed eagerly all the same; `hybridized`
            has the figures.
        batch_norm: "shard": BatchNorm layers in training go by the statistics of each shard, as on
            as many devices; "sync": by those of the whole batch, on CPUs of one process. Then all
            shards of a step are under way at once: their activations lie in memory together, and
            devices get as many shards each. Part of the experiment.
        before_update: called with the module between sum and update, when each `parameter.grad`
            holds the mean gradient of the batch: the place for clipping.
        scheduler: saved and resumed with the rest; stepping it stays with the user.
        max_in_flight: steps that may be unfinished at once. 1: a step is finished when `step`
            returns. 2: `step` returns at once, so that the next batch is loaded and copied
            meanwhile; then call `waitall` before you read or change the model. Schedulers and
            changes of the optimizer's groups take effect at the right step all the same (not so
            those of an optimizer inside another one: leave these at 1).
        lost_after_s: a device that is at one shard for so long (and for twenty times its usual
            time) while another one waits is given up, and the others do its shards.
        peer_timeout_s: with several processes: how long to wait for another one.
        check_every: with several processes: after how many steps to compare their states.
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
        hybridize: bool = False,
        batch_norm: BatchNorm = "shard",
        before_update: Callable[[nn.Module], object] | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        max_in_flight: int = 1,
        lost_after_s: float = 60.0,
        peer_timeout_s: float = 60.0,
        check_every: int = 1000,
        lanes: Callable[[Sequence[Device]], Lanes] = ThreadLanes,
    ) -> None:
        experiment = Experiment(
            shards=shards,
            seed=seed,
            precision=precision,
            memory_format=memory_format,
            threads=threads,
            hybridize=hybridize,
            batch_norm=batch_norm,
        )
        if max_in_flight < 1 or check_every < 1:
            raise InputError(
                f"got max_in_flight={max_in_flight} and check_every={check_every}: at least 1 is "
                f"needed"
            )
        self.devices = find_devices(devices, threads=threads, share=local_share())
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
        self.on_shard: Callable[[int, NodeSum], None] | None = None
        self._peer_timeout_s = peer_timeout_s
        self._check_every = check_every
        self._max_in_flight = max_in_flight
        self._saves = Saves()
        self._is_open = False
        self._opened = contextlib.ExitStack()
        channels_last = self.experiment.memory_format == "channels_last"
        move_home(model, optimizer, self.devices[0], channels_last=channels_last)
        overlap = max_in_flight > 1
        self._engine = Engine(self.devices, lanes=lanes)
        self._timekeeper = Timekeeper(self._engine)
        self._replicas = Replicas(
            model, self.devices, apart=overlap, abreast=self._shards_at_once()
        )
        self._team = Team(shards)
        self._runner = ShardRunner(
            self.experiment, self._replicas, self._engine, self._timekeeper, self._team
        )
        self._twin = OptimizerTwin(optimizer) if overlap else None
        self._update = Update(optimizer, self._replicas, before_update, self._twin)
        self._flight = Flight(
            self._engine,
            self._runner,
            self._timekeeper,
            overlap=overlap,
            lost_after_s=lost_after_s,
            abandoned=self._abandoned,
        )

    def __enter__(self) -> Trainer:
        """Start the lanes."""
        for note in self.notes:
            logger.warning(note)
        with contextlib.ExitStack() as opened:
            opened.enter_context(
                self._team.linked(
                    self._replicas,
                    self._peer_timeout_s,
                    self._facts,
                    self._runner.shards_per_s,
                    self._max_in_flight,
                )
            )
            opened.enter_context(kept_memory())
            opened.enter_context(deterministic_kernels(self.devices))
            opened.enter_context(self._engine)
            self._refuse_apart()
            opened.enter_context(self._saves)
            self._opened = opened.pop_all()
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the steps in flight (after an error, drop them), and stop the lanes.

        The model stays usable.
        """
        try:
            if error is None:
                self.waitall()
            else:
                self._flight.abandon(error)
                self._flight.leave(error)
                if self._twin:
                    self._twin.give_back()
        finally:
            self._is_open = False
            self._opened.__exit__(kind, error, traceback)

    def step(self, *batch: Batch) -> Pending:
        """Train on one minibatch: split, compute the shards, sum, update.

        Args:
            batch: tensors, or nestings of tuples, lists and dicts of tensors, examples first. With
                several processes: what `epoch` yields, or the same whole batch in each.

        Returns:
            A handle of the batch's mean loss (before the update).

        Raises:
            BatchError: the batch can't be cut into shards.
            NonFiniteLossError: a shard's loss is NaN or infinite. As after every error before the
                update, and Ctrl-C, the model is as the step found it. With `max_in_flight` above 1
                a step's error is raised where somebody waits for it: by its handle, a later
                `step`, or `waitall`; the steps after it were not taken.
        """
        self._saves.check()
        if self.steps_done % self._check_every == 0 and self.steps_done:
            self._compare_states()
        cut = self._runner.split(batch, self.steps_done)
        self._open_flight(leave=self._max_in_flight - 1)
        self._refuse_lonely(cut.bounds)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            return self._minimise(cut)
        run = self._next_run(cut, self._update)
        if self._twin:
            run.settings = self._twin.record()
        self._count_step()
        try:
            self._flight.start(run)
        except BaseException as error:  # Ctrl-C
            self._flight.abandon(error)
            if not run.finished:
                self._abandoned(run)
            raise
        if self._max_in_flight == 1 or self._runner.watch.is_first_step:
            self._flight.complete()
        return StepLoss(run, lambda run: self._flight.complete(until=run))

    def epoch(self, loader: Loader) -> Iterator[Batch]:
        """Yield what is left of the current epoch's batches; then the next epoch begins.

        Raises:
            BatchError: the epoch's last batch can't be trained on; said before its first.
        """
        last = loader.epoch_examples - (len(loader) - 1) * loader.batch_size
        self._refuse_lonely(shard_bounds(last, self.experiment.shards))
        self._wait_for_peers_steps()
        batches = self._team.batches(loader, self.cursor, self.steps_done)
        began_s = time.perf_counter()
        for batch in batches:
            self._timekeeper.loaded(began_s)
            yield batch
            self._team.note("loading a batch")
            began_s = time.perf_counter()
        self.cursor = Cursor(self.cursor.epoch + 1, 0)

    def batches(self, loader: Loader) -> Iterator[Batch]:
        """Yield the batches of the loader's epoch 0, to be given to `evaluate`.

        Of several processes each gets, and fetches, its own part of each.
        """
        self._wait_for_peers_steps()
        yield from self._team.batches(loader, Cursor(), self.steps_done)

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
        self._open_flight()
        with evaluation_mode(self.model):
            for cut, seed_of in self._cuts(batches):
                measured = self._runner.measure(cut, self._measure, metrics, seed_of)
                for name, (total, count) in measured.items():
                    sums[name] = (sums[name][0] + total, sums[name][1] + count)
        if any(count == 0 for _, count in sums.values()):
            raise BatchError("evaluate counted no examples: give at least one batch")
        return {name: total / count for name, (total, count) in sums.items()}

    def predict(self, batches: Iterable[Batch], forward: Forward = output_of) -> Batch:
        """Return the model's output for every example, computed as `evaluate` does.

        Args:
            batches: as for `evaluate`. Of a Loader every example is taken once, as they lie in the
                data set, whether it shuffles or not.
            forward: `forward(model, *batch)`, a tensor or a nesting of tensors with a row for each
                example; by default the model's output for the batch's first part.

        Returns:
            What `forward` returns, for all examples in their order, on the CPU; of several
            processes in each.

        Raises:
            BatchError: there is no batch.
            ModelError: an output has not one row for each example.
        """
        if isinstance(batches, Loader):
            batches = batches.in_order()
        outputs: list[Batch] = []
        self._open_flight()
        with evaluation_mode(self.model):
            for cut, seed_of in self._cuts(batches):
                outputs += self._runner.predict(cut, forward, seed_of)
        if not outputs:
            raise BatchError("predict got no examples: give at least one batch")
        return optree.tree_map(lambda *rows: torch.cat(rows), *outputs)

    def waitall(self) -> None:
        """Wait for every step; afterwards the model may be read, and changed in any way.

        Raises:
            the error of a step in flight; it and those after it were not taken.
        """
        self._flight.complete()
        if self._twin:
            self._twin.give_back()
        self._replicas.mark_touched()
        self._timekeeper.rest()

    def fingerprint(self) -> str:
        """Return the SHA-256 of parameters, buffers and optimizer state (hexadecimal).

        Waits for the steps in flight.
        """
        self.waitall()
        return fingerprints.fingerprint(self.model, self.optimizer)

    def save(self, folder: str | Path, *, keep: int = 3, aside: bool = False) -> Path:
        """Save everything that training goes on from, in a new folder `step-…` in `folder`.

        Args:
            folder: where this run's checkpoints lie; made if it isn't there.
            keep: how many of them are kept, the newest ones.
            aside: return as soon as the state is copied (which takes as much memory again), and
                write the copy while training goes on. What goes wrong then is raised by a later
                `step` or `save`, by `wait_for_save`, or at the end: closing the trainer waits.

        Of several processes, each of which must call this, the first one writes.

        Raises:
            SaveError: it can't be written; the checkpoints before it are whole.
        """
        self.waitall()
        tree = {
            "experiment": dataclasses.asdict(self.experiment),
            "cursor": dataclasses.asdict(self.cursor),
            "steps_done": self.steps_done,
            "draws_random": self._runner.watch.draws,
            "compiles": self._runner.programs.compiles if self._runner.programs else None,
            "model": training_state.model_state(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
        }
        entries = fingerprints.named_state(self.model, self.optimizer)
        given = (Path(folder), tree, entries, self.steps_done, keep)
        if aside and self._is_open:
            if self._team.is_first:
                self._saves.start(*given)
            return checkpoint_of(Path(folder), self.steps_done)
        self.wait_for_save()
        return self._team.by_the_first(lambda: write_state(*given))

    def wait_for_save(self) -> None:
        """Wait until what `save(aside=True)` has begun is on the disk.

        Raises:
            SaveError: it could not be written; the checkpoints before it are whole.
        """
        self._saves.wait()

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
            options: as for `Trainer`. Shards, seed, precision, memory format, threads and
                hybridize are the checkpoint's; others are refused.

        Raises:
            CheckpointError: missing, damaged, or of another model, optimizer or experiment.
        """
        saved = read_checkpoint(Path(folder))
        training_state.check_is_training_state(saved, Path(folder))
        trainer = cls(model, optimizer, loss, **{**saved["experiment"], **options})
        trainer._restore(saved)
        return trainer

    def ask_to_stop(self) -> None:
        """Have `shall_stop` become true; of several processes in all, before the same step."""
        self._team.ask_to_stop()

    @property
    def shall_stop(self) -> bool:
        """Whether no further step shall be taken, because somebody called `ask_to_stop`."""
        return self._team.shall_stop(self.steps_done, self._max_in_flight)

    @property
    def trace(self) -> Trace:
        """What ran where and when; `trace.save(file)` writes it for Perfetto."""
        return self._engine.trace

    @property
    def hybridized(self) -> Hybridized | None:
        """What came of `hybridize`, from the first step on; None without it."""
        programs = self._runner.programs
        return programs.told if programs is not None else None

    @property
    def compile_s(self) -> float:
        """The seconds that compiling took so far; they belong to no step's time."""
        return self.hybridized.compile_s if self.hybridized is not None else 0.0

    def shares(self) -> tuple[DeviceShares, ...]:
        """Return for each device where the time of the training steps went."""
        return self._timekeeper.shares()

    @property
    def busy_s(self) -> list[float]:
        """For each device, the seconds of training steps in which it had work."""
        return [own.compute_s + own.sum_s + own.update_s for own in self.shares()]

    # ---- the rest is what the steps above are made of

    def _shards_at_once(self) -> int:
        """Return how many shards of a step each device has under way at the same time."""
        if self.experiment.batch_norm == "shard":
            return 1
        if any(device.kind != "cpu" for device in self.devices):
            raise InputError(
                f"got batch_norm='sync' and {self.devices[0]}, but only CPU devices can wait for "
                f"each other's shards: name CPU devices, or leave it out"
            )
        return -(-self.experiment.shards // len(self.devices))

    def _refuse_apart(self) -> None:
        """Refuse to go in lockstep where shards can't wait for each other."""
        if self.experiment.batch_norm == "shard":
            return
        if self._team.exchange is not None:
            raise InputError(
                "got batch_norm='sync' in one of several processes, which don't wait for each "
                "other's shards: use the devices of one process, or leave it out"
            )
        if len(self.devices) > 1 and not self._engine.side_by_side:
            raise InputError(
                f"with batch_norm='sync' the {len(self.devices)} devices wait for each other, "
                f"which lanes without threads can't: use one device, or ThreadLanes"
            )

    def _refuse_lonely(self, bounds: Sequence[tuple[int, int]]) -> None:
        if self.experiment.batch_norm == "shard":
            refuse_lonely_batch_norm(self.model, bounds)

    def _compare_states(self) -> None:
        """Make sure that all processes are in the same state (a flipped bit would spread)."""
        self._wait_for_peers_steps()
        digests = functools.partial(fingerprints.digests, self.model, self.optimizer)
        self._team.refuse_divergence(digests, self.steps_done)

    def _wait_for_peers_steps(self) -> None:
        """Let no step be in flight while the front end speaks with other processes."""
        if self._team.exchange:
            self._flight.complete()

    def _facts(self) -> dict[str, object]:
        """Return what must be the same in every process."""
        return {
            "the version of torch": torch.__version__,
            "the kind of device": self.devices[0].model_name,
            **dataclasses.asdict(self.experiment),
            "the steps done": self.steps_done,
            "the place in the data": [self.cursor.epoch, self.cursor.step],
            "the fingerprint of model and optimizer": fingerprints.fingerprint(
                self.model, self.optimizer
            ),
        }

    def _open_flight(self, leave: int = 0) -> None:
        """Wait until at most `leave` steps are in flight, and let replicas start from the model."""
        if not self._is_open:
            raise ClosedError(
                "the trainer is not open: use it as `with evenstep.Trainer(...) as trainer:`"
            )
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise InputError(
                "torch.autocast around a step has no hold in the lanes: use "
                'Trainer(precision="bf16") instead'
            )
        may_compile = self._runner.programs is not None  # which nothing in flight shall see
        self._flight.complete(down_to=0 if may_compile else leave)
        if len(self._flight) and (self._replicas.is_behind or not self._twin_fits):
            self._flight.complete()
        if not len(self._flight):
            self._follow_user()

    def _follow_user(self) -> None:
        """Bring replicas and twin up to what the user did to the model and the optimizer."""
        if self._replicas.follow_home():
            self._in_first_lane(self._update.bring_copies_up_to_date)
        if self._twin and not self._twin.fits:
            self._twin.renew()

    @property
    def _twin_fits(self) -> bool:
        return self._twin is None or self._twin.fits

    def _next_run(self, cut: Cut, finish: Callable[..., None]) -> StepRun:
        cursor = self.cursor
        return StepRun(
            number=self.steps_done,
            cursor=cursor,
            attempt=Attempt(cut, self.steps_done),
            objective=self._objective,
            seed_of=functools.partial(shard_seed, self.experiment.seed, cursor.epoch, cursor.step),
            observe=self.on_shard,
            finish=finish,
        )

    def _abandoned(self, run: StepRun) -> None:
        """Steps from `run` on were not taken: go back to where it was to begin."""
        self.cursor, self.steps_done = run.cursor, run.number
        if self._twin:
            self._twin.renew()

    def _cuts(self, batches: Iterable[Batch]) -> Iterator[tuple[Cut, SeedOf]]:
        """Yield each batch to be evaluated, cut, and the seeds of its shards."""
        if isinstance(batches, Loader):
            batches = self.batches(batches)
        for number, batch in enumerate(batches):
            cut = self._runner.split(_as_arguments(batch), self.steps_done)
            self._open_flight()
            yield cut, functools.partial(derive_seed, "evaluation", self.experiment.seed, number)

    def _minimise(self, cut: Cut) -> Pending:
        """Update with an optimizer that evaluates the batch as often as it likes (LBFGS).

        Its own arithmetic runs in the caller's thread, with the devices' number of threads.
        """
        closure = Closure(functools.partial(self._evaluate_once, cut), self._update, self._replicas)
        self._flight.complete()
        with (
            training_state.rolled_back_on_error(self.model, self.optimizer),
            intra_op_threads(self.experiment.threads),
        ):
            self.optimizer.step(closure)
        assert closure.first is not None
        assert closure.root is not None
        self._in_first_lane(functools.partial(self._update.close, closure.root))
        self._count_step()
        return StepLoss(closure.first, lambda run: None)

    def _evaluate_once(self, cut: Cut, finish: Callable[..., None]) -> StepRun:
        self._follow_user()
        run = self._next_run(cut, finish)
        self._flight.start(run)
        self._flight.complete()
        return run

    def _count_step(self) -> None:
        self.cursor = Cursor(self.cursor.epoch, self.cursor.step + 1)
        self.steps_done += 1

    def _in_first_lane(self, function: Callable[[], None]) -> None:
        """Run `function` where the update is done, and wait for it."""
        self._engine.submit(function, device=self.devices[self._engine.first_lane]).wait_to_read()

    def _restore(self, saved: Mapping[str, Any]) -> None:
        training_state.check_experiment(self.experiment, saved["experiment"])
        training_state.restore_model(self.model, saved["model"])
        training_state.restore_optimizer(self.optimizer, saved["optimizer"])
        training_state.restore_scheduler(self.scheduler, saved["scheduler"])
        self.cursor = Cursor(**saved["cursor"])
        self.steps_done = saved["steps_done"]
        self._runner.watch.draws = saved["draws_random"]
        if self._runner.programs:
            self._runner.programs.compiles = saved["compiles"]
        training_state.check_fingerprint(self.fingerprint(), saved["fingerprint"])


def _as_arguments(batch: Batch) -> tuple[Batch, ...]:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)
