"""The trainer: the user's model and optimizer, stepped on every device.

A step is the recipe of Dive into Deep Learning, "Training on Multiple GPUs" (`train_batch`): split
the batch, compute losses and gradients side by side, sum them, update; here over shards instead of
devices.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn

from evenstep.batch import Batch, shard_bounds
from evenstep.batch.nesting import Keywords, nest
from evenstep.batch.own_shards import in_own_memory
from evenstep.batch.rng import CALLERS_GENERATORS
from evenstep.callbacks import Callback
from evenstep.checkpoint import fingerprint as fingerprints
from evenstep.checkpoint import training_state
from evenstep.checkpoint.async_writer import AsyncWriter, write_state
from evenstep.checkpoint.files import checkpoint_of
from evenstep.checkpoint.optimizer_kind import kinds_of
from evenstep.checkpoint.user_state import Stateful, UserState, encodable
from evenstep.contract import ContractReport, SelfCheck, refuse_modes
from evenstep.data import Cursor
from evenstep.data.adapters.sources import Batches, Source, Sources
from evenstep.devices import (
    Device,
    Devices,
    deterministic_kernels,
    find_devices,
    intra_op_threads,
    kept_memory,
    layout_notes,
    rounding_notes,
)
from evenstep.devices.discovery import WITHIN_ROUNDING
from evenstep.distributed import local_share
from evenstep.distributed.process_group import END
from evenstep.distributed.step_report import NO_DIGEST
from evenstep.engine import Engine, Lanes, Task, ThreadLanes
from evenstep.engine.interrupts import INTERRUPTS, interruptible
from evenstep.engine.lanes import has_own_modes
from evenstep.engine.ownership import Ownership
from evenstep.engine.task import PLAIN
from evenstep.errors import (
    ClosedError,
    DeviceLostError,
    DivergedError,
    InputError,
    PeerError,
)
from evenstep.experiment import (
    BatchNorm,
    BufferRule,
    Experiment,
    MemoryFormat,
    Precision,
)
from evenstep.profiling.accounting import DeviceShares
from evenstep.profiling.clock import Timekeeper
from evenstep.profiling.trace import Trace
from evenstep.replicas import (
    OptimizerProxy,
    Replicas,
    channels_last_weights,
    check_followed,
    check_trainable,
    move_home,
    refuse_strangers,
)
from evenstep.shard.compile_policy import Hybridized
from evenstep.shard.evaluation import Forward, measure_model, measure_output, output_of
from evenstep.shard.loss import Loss, Objectives, UserObjective, choose_objective
from evenstep.shard.partial_sum import PartialSum
from evenstep.shard.sync_batch_norm import refuse_single_example_shards
from evenstep.steps.executor import IndependentExecutor, LockstepExecutor
from evenstep.steps.group import OPEN, Group, joined
from evenstep.steps.overlapped_pipeline import OverlappedPipeline
from evenstep.steps.pipeline import DirectPipeline, Pipeline
from evenstep.steps.step import Finish, Position, Step, StepLoss
from evenstep.steps.update import Closure, Hook, ProxyUpdate, Update, kept_gradients
from evenstep.training.agreement import Agreement
from evenstep.training.arguments import (
    check_flags,
    check_functions,
    check_kinds,
    check_numbers,
    check_parts,
    only_one,
    refuse_compiled_lockstep,
    refuse_lockstep_apart,
    shards_at_once,
)
from evenstep.training.evaluator import Evaluator
from evenstep.training.habits import EpochLoop, Habits
from evenstep.training.reporting import Reporter, check_callbacks

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("evenstep")

_TENSORS = {torch.Tensor}
_FOLLOW_EVERY = 16  # steps between two looks for handlers of signals that the user has installed


class TrainerOptions(TypedDict, total=False):
    """The keyword arguments of `Trainer` that `Trainer.load` takes too."""

    objective: UserObjective | None
    devices: Devices
    experiment: Experiment | None
    shards: int
    seed: int
    precision: Precision
    memory_format: MemoryFormat
    threads: int
    compile: bool
    hybridize: bool
    batch_norm: BatchNorm
    separable: bool
    buffers: dict[str, BufferRule]
    batch_dim: int
    clip_norm: float | None
    side_by_side: bool
    before_update: Hook | None
    after_update: Hook | None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    state: Mapping[str, Stateful] | None
    callbacks: Sequence[Callback]
    max_in_flight: int
    lost_after_s: float
    peer_timeout_s: float
    allow_rounding: bool
    check: str
    check_every: int
    tune_malloc: bool
    lanes: Callable[[Sequence[Device]], Lanes]


class Trainer(Habits):
    """Trains a model on many devices, with a result that does not depend on how many there are.

    Use it with `with` (or `open`), which starts and stops a worker thread for each device. In a
    script that torchrun starts several times it also finds the other processes: they train one
    model together, each with devices of its own. The module and the optimizer stay the user's own:
    read them, change them and save them between steps, and step any scheduler after `step`.
    Gradient hooks (`parameter.register_hook`) are called once for each step, with the batch's mean
    gradient.

    Args:
        model: any `nn.Module`; it is moved to the first device.
        optimizer: any `torch.optim` optimizer over parameters of `model`.
        loss: a mean-reduced `loss(output, *targets)`, for batches `(input, *targets)`.
        objective: instead of `loss`, for everything else: `objective(model, *batch) ->
            (total, count)`, which must call the `model` that it is given. A single scalar is the
            mean over the examples; a dict of outputs may follow.
        devices: "auto", a number, a name such as "cpu:1", or a list of names (see `find_devices`).
        experiment: all choices that the result depends on, as one value, instead of the keywords
            from `shards` to `clip_norm`.
        shards: V, the number of shards that every minibatch is cut into; at most 65,536.
        seed: the seed of the random ops in the model.
        precision: "fp32" for the parameters' own dtype, "bf16" for autocast.
        memory_format: of images and convolution weights: "auto" (a fixed rule), "contiguous" or
            "channels_last". A state dict, and the closed trainer's model and optimizer, have the
            layout that they came with.
        threads: intra-op threads of each device; at most 1,024.
        compile: whether to compile a shard's forward and backward pass, on CPUs. A line in the log
            says what that gains, or why shards are computed eagerly; `hybridized` has the figures.
        hybridize: the book's name for `compile`.
        batch_norm: "shard" normalises in training with the statistics of each shard; "sync" with
            those of the whole batch, on the CPU devices of one process: then all activations of a
            batch are in memory at once, and every device computes the same number of shards.
        separable: whether the objective must add up over shards, as every mean over examples does.
            Otherwise training is refused. With False it need not, and V changes what is trained.
        buffers: for buffers that shards write, by name (or a pattern such as "*.queue"), how the
            shards' values become the one after the step: their "mean" over the examples, the value
            after the "first" shard, the "sum" of all changes, or "refuse". Without a rule, floating
            point buffers are averaged if every shard writes all of them; others are refused.
        batch_dim: the dimension that the examples of a batch lie along: 1 for batches of shape
            (time, batch, features). A tensor that has no such dimension (labels of shape (batch,))
            is cut along its first.
        clip_norm: the largest norm of the batch's mean gradient; a larger one is scaled down to it,
            as by `torch.nn.utils.clip_grad_norm_`, after `before_update`. The norm is then in
            `step(...).outputs["grad_norm"]`.
        side_by_side: compute all shards of a batch at the same time, so that they can call
            `evenstep.all_gather`, on the CPU devices of one process, as with `batch_norm="sync"`.
            It changes no result.
        before_update: called with the module when each `parameter.grad` holds the batch's mean
            gradient and the optimizer has not stepped yet: the place for clipping.
        after_update: called with the module after the optimizer's step and before the next step's
            shards begin: the place for an average of the parameters (EMA) or a momentum encoder,
            right with any number of steps in flight. It runs in a worker thread, in every process.
            What it writes into the module (also parameters with `requires_grad=False`) reaches all
            devices and the checkpoint; what it writes elsewhere (an `AveragedModel`) is for the
            user to save, after `waitall`. An error in it leaves the update made.
        scheduler: a scheduler that is saved and resumed with the rest; the user steps it.
        state: objects of your own, by name, that are saved and resumed with the rest, such as
            `{"ema": ema, "random": evenstep.data.GeneratorStates()}`. Anything with `state_dict`
            and `load_state_dict` will do, if its state is made of tensors and plain values. With
            several processes, the first one's states are saved, and all get them back.
        callbacks: objects that are called after steps, epochs and checkpoints, to log or to show
            them (see `evenstep.callbacks.Callback`). They have no effect on the result.
        max_in_flight: the number of steps that may be unfinished at once, at most 1,000. With 1, a
            step is finished when `step` returns. With 2, `step` returns at once, and the next batch
            is loaded and copied meanwhile; call `waitall` before you read or change the model.
            Schedulers and changes of the optimizer's groups take effect at the right step all the
            same; an optimizer inside another one is refused.
        lost_after_s: seconds after which a device that is still at one shard, while another one
            has none, is given up and its shards are computed by others. At least twenty times the
            device's usual time for a shard pass first.
        peer_timeout_s: with several processes, seconds to wait for another one; at most a year.
        allow_rounding: with several processes, train although their processors, libraries or
            settings round differently, which is refused otherwise. Results are then equal within
            rounding, not bit for bit: `within_rounding` is true, and all processes take the first
            one's state whenever states are compared.
        check: when to check, on one or two shards, that the code keeps the contract of a step:
            "first", in the first step (also after a resume, or a change of the model's layers),
            "every 100" steps, or "off". It has no effect on the result; `contract` has its report.
        check_every: with several processes, the number of steps after which states are compared,
            and the batches that `step` is given. States are also compared after the first step,
            by `save`, `evaluate` and `predict`, and at the end of the `with`.
        tune_malloc: whether the C library's allocator keeps freed memory for the next step while
            the trainer is open.
        lanes: makes what runs the work; `InlineLanes` runs it in the calling thread.

    Attributes:
        position: the steps done, and the place in the data.
        notes: lines about devices and choices for the user, logged when the trainer is opened.
        within_rounding: whether results are equal to those of other devices within rounding, not
            bit for bit; a note says why.
        on_shard: for debugging: called in the worker threads as `on_shard(shard, value)` with
            every shard's own gradients and buffers, before anything is added to them. While it is
            set, each device computes its own shards, as many as the others, and steals none.

    Raises:
        InputError: the model, the optimizer or an option can't be used; nothing was changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        *,
        objective: UserObjective | None = None,
        devices: Devices = "auto",
        experiment: Experiment | None = None,
        shards: int = 8,
        seed: int = 0,
        precision: Precision = "fp32",
        memory_format: MemoryFormat = "auto",
        threads: int = 1,
        compile: bool = False,  # noqa: A002 - as torch names it
        hybridize: bool = False,
        batch_norm: BatchNorm = "shard",
        separable: bool = True,
        buffers: dict[str, BufferRule] | None = None,
        batch_dim: int = 0,
        clip_norm: float | None = None,
        side_by_side: bool = False,
        before_update: Hook | None = None,
        after_update: Hook | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        state: Mapping[str, Stateful] | None = None,
        callbacks: Sequence[Callback] = (),
        max_in_flight: int = 1,
        lost_after_s: float = 60.0,
        peer_timeout_s: float = 60.0,
        allow_rounding: bool = False,
        check: str = "first",
        check_every: int = 1000,
        tune_malloc: bool = True,
        lanes: Callable[[Sequence[Device]], Lanes] = ThreadLanes,
    ) -> None:
        keywords = Experiment(
            shards=shards,
            seed=seed,
            precision=precision,
            memory_format=memory_format,
            threads=threads,
            compile=compile or hybridize,
            batch_norm=batch_norm,
            separable=separable,
            buffers={} if buffers is None else buffers,
            batch_dim=batch_dim,
            clip_norm=clip_norm,
        )
        experiment = only_one(experiment, keywords)
        check_numbers(
            max_in_flight=max_in_flight,
            check_every=check_every,
            peer_timeout_s=peer_timeout_s,
            lost_after_s=lost_after_s,
        )
        check_flags(
            side_by_side=side_by_side, tune_malloc=tune_malloc, allow_rounding=allow_rounding
        )
        check_functions(before_update=before_update, after_update=after_update)
        check_kinds(model, optimizer)
        check_parts(scheduler, lanes)
        callbacks = check_callbacks(callbacks)
        refuse_compiled_lockstep(experiment, side_by_side=side_by_side)
        self.devices = find_devices(devices, threads=experiment.threads, share=local_share())
        self._objective = choose_objective(loss, objective)
        self._others = Objectives()
        check_trainable(model, optimizer)
        self._known = {*model.parameters()}  # those that the optimizer was made for
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.experiment = experiment.resolved_for(model, self.devices[0].kind)
        self.notes = layout_notes(self.devices, self.experiment.shards)
        self.within_rounding = bool(rounding_notes(self.devices))
        if self.experiment.shards > 1 and not self.experiment.separable:
            self.notes.append(
                f"separable=False: the number of shards, {self.experiment.shards}, is a part of "
                f"what is trained"
            )
        self.position = Position()
        self._epoch_loop = EpochLoop()
        self._drawn = Cursor()  # the place behind the last batch that `epoch` has yielded
        self.on_shard: Callable[[int, PartialSum], None] | None = None
        self._peer_timeout_s = peer_timeout_s
        self._allow_rounding = allow_rounding
        self._agreement = Agreement(model, optimizer, loss, check_every)
        self._max_in_flight = max_in_flight
        self._tune_malloc = tune_malloc
        self._side_by_side = side_by_side or experiment.batch_norm == "sync"
        self._saves = AsyncWriter()
        self._sources = self._new_sources()
        self._owner: Ownership | None = None
        self._is_open = False
        self._was_saved = False
        own = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        self._user_state = UserState(state, {k: v for k, v in own.items() if v is not None})
        self._opened = contextlib.ExitStack()
        move_home(model, optimizer, self.devices[0])
        self._engine = Engine(self.devices, lanes=lanes)
        self._build(before_update, after_update, lost_after_s, callbacks)
        measure = measure_model if loss is None else measure_output
        self._evaluator = Evaluator(model, self._executor, measure)
        self._self_check = SelfCheck(
            check,
            self.experiment,
            self._replicas,
            self._engine,
            side_by_side=self._side_by_side,
        )

    def _build(
        self,
        before_update: Hook | None,
        after_update: Hook | None,
        lost_after_s: float,
        callbacks: Sequence[Callback],
    ) -> None:
        """Choose the parts that a step is made of."""
        overlap = self._max_in_flight > 1
        per_device = shards_at_once(self.experiment, self.devices) if self._side_by_side else 1
        self._group = Group(self.experiment.batch_dim)
        names = [device.name for device in self.devices]
        self._timekeeper = Timekeeper(self._engine.trace, names)
        self._replicas = Replicas(
            self.model,
            self.devices,
            home_computes=not overlap,
            per_device=per_device,
            buffers=self.experiment.buffers,
        )
        make_executor = LockstepExecutor if self._side_by_side else IndependentExecutor
        self._executor = make_executor(
            self.experiment, self._replicas, self._engine, self._timekeeper, self._group
        )
        self._proxy = OptimizerProxy(self.optimizer) if overlap else None
        clip_norm = self.experiment.clip_norm
        if clip_norm is None and any(one.grad_norm for one in callbacks):
            clip_norm = math.inf  # which only measures it
        given = self.optimizer, self._replicas, before_update, after_update, clip_norm
        self._update = ProxyUpdate(*given, self._proxy) if self._proxy else Update(*given)
        kinds = {(device.kind, device.threads) for device in self.devices}
        direct = kinds == {("cpu", self.experiment.threads)} and not overlap
        make_pipeline: Callable[..., Pipeline] = DirectPipeline if direct else OverlappedPipeline
        self._pipeline = make_pipeline(
            self._executor,
            self._timekeeper,
            max_in_flight=self._max_in_flight,
            lost_after_s=lost_after_s,
            abandoned=self._abandoned,
        )
        minimises = isinstance(self.optimizer, torch.optim.LBFGS)
        optimizer, timekeeper = self.optimizer, self._timekeeper
        self._reporter = Reporter(callbacks, optimizer, self._pipeline, timekeeper, names)
        self._take = self._reporter.watching(self._minimise if minimises else self._pipeline.submit)
        self._record_settings: Callable[[], Sequence[Any]] = (
            self._proxy.record if self._proxy and not minimises else tuple
        )

    @INTERRUPTS.shielded
    def __enter__(self) -> Trainer:
        """Start the worker threads, and find the other processes."""
        self._refuse_fork()
        if self._is_open:
            raise ClosedError("the trainer is open already: remove the second `with` or `open`")
        for note in self.notes:
            logger.warning(note)
        self._agreement.begin(self.steps_done)
        with contextlib.ExitStack() as opened:
            opened.enter_context(INTERRUPTS.handled())
            if self.experiment.memory_format == "channels_last":
                opened.enter_context(channels_last_weights(self.model, self.optimizer))
                self._replicas.rebuild()
            group = interruptible(
                opened.enter_context,
                joined(
                    self._replicas,
                    self.experiment,
                    self._peer_timeout_s,
                    self._facts,
                    self._executor.shards_per_s,
                    self._max_in_flight,
                    allow_rounding=self._allow_rounding,
                ),
            )
            if self.shall_stop:
                group.ask_to_stop()
            self._group = self._executor.group = group
            if group.differences:
                self._note_rounding(f"the processes round differently: {group.differences}")
                logger.warning(self.notes[-1])
                self._compare_states(OPEN)
            reporter = self._reporter.opened(self.steps_done, is_first=group.is_first)
            opened.enter_context(reporter)
            opened.enter_context(kept_memory(self._tune_malloc))
            opened.enter_context(deterministic_kernels(self.devices))
            opened.enter_context(CALLERS_GENERATORS.installed())
            opened.enter_context(self._engine)
            if self._side_by_side:
                refuse_lockstep_apart(
                    self.experiment,
                    self.devices,
                    is_alone=group.is_alone,
                    has_threads=self._engine.side_by_side,
                )
            opened.enter_context(self._saves)
            opened.callback(self._sources.close)
            hook = self.optimizer.register_step_pre_hook(self._update.refuse_foreign_step)
            opened.callback(hook.remove)
            INTERRUPTS.check()
            self._opened = opened.pop_all()
        self._is_open = True
        self._owner = Ownership("trainer", self._close_at_exit)
        return self

    @INTERRUPTS.shielded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish the steps in flight (after an error, drop them), and stop the threads.

        The model stays usable.
        """
        if self._owner is not None and self._owner.is_elsewhere:  # a fork has no threads to stop
            return
        try:
            if error is None:
                self._finish_steps()
                if not self._agreement.is_state_compared(self.steps_done):
                    self._compare_states(END)
                self._reporter.tell()
            else:
                self._pipeline.abandon(error)
                self._group.reducer.leave(error)
                if self._proxy:
                    self._proxy.give_back()
        finally:
            self._is_open = False
            atexit.unregister(self._close_with_program)
            if self._owner is not None:
                self._owner.end()
            self._group = self._executor.group = self._group.alone()
            try:
                self._opened.__exit__(kind, error, traceback)
            finally:
                INTERRUPTS.deliver()

    def open(self) -> Trainer:
        """Start the worker threads, as `with` does, and return this trainer.

            trainer = evenstep.Trainer(model, optimizer, loss).open()

        For scripts whose loop shall not be indented. `close` closes the trainer, and so does the
        end of the program. With steps in flight, call `close`: an error that is noticed only at
        the end of the program is printed, but does not change the exit status.
        """
        self.__enter__()
        atexit.register(self._close_with_program)
        return self

    def close(self) -> None:
        """Finish the steps in flight and stop the threads, as the end of `with` does.

        The model stays usable. On a closed trainer nothing happens.
        """
        self._refuse_fork()
        if self._is_open:
            self.__exit__(None, None, None)

    def _close_with_program(self) -> None:
        """Close what `open` has opened; after an error that ends the program, as `with` does."""
        error = getattr(sys, "last_value", None)
        self.__exit__(None if error is None else type(error), error, None)

    def _close_at_exit(self) -> None:
        self.__exit__(ClosedError, ClosedError("the program ended"), None)

    def _refuse_fork(self) -> None:
        """Refuse a call in a fork of the process that opened the trainer."""
        if self._owner is not None:
            self._owner.refuse_elsewhere()

    @property
    def cursor(self) -> Cursor:
        """The place in the data: batch number `step` of `epoch` is the next to train on.

        It counts the batches that `Trainer.epoch` has yielded. The last one counts as soon as a
        step is taken on it or the next one is drawn, so a loop may save or stop before its step.
        For a loader of your own, it counts the steps.
        """
        return self.position.cursor

    @property
    def steps_done(self) -> int:
        """The steps since the start of the training, over all epochs and resumes."""
        return self.position.steps_done

    def step(self, *batch: Batch, **named: Batch) -> StepLoss:
        """Train on one minibatch: split, compute the shards, sum, update.

        Args:
            batch: tensors, or nestings of tuples, lists, mappings and dataclasses of tensors,
                examples first (or along `batch_dim`); `evenstep.shared(tensor)` for a tensor that
                every shard gets whole. Numbers, strings, booleans and None go to every shard as
                they are; a mapping of any kind arrives as a dict. Or one `evenstep.Shards`: the
                batch as micro-batches of your own. With several processes: what `epoch` yields, or
                the same whole batch in each process.
            named: the same by name; the objective gets them by name: `trainer.step(**batch)` calls
                `objective(model, **shard)`. With a `loss`, they are inputs of the model.

        Returns:
            A handle of the batch's mean loss, computed before the update.

        Raises:
            BatchError: the batch can't be cut into shards.
            ContractError: the code breaks the contract of a step; the message names what does.
            NonFiniteLossError: a shard's loss is NaN or infinite. As after every error before the
                update, and Ctrl-C, the model is as the step found it. With `max_in_flight` above 1
                a step's error is raised where somebody waits for it: by its handle, a later
                `step`, or `waitall`; the steps after it were not taken.
            KeyboardInterrupt: Ctrl-C was pressed. Steps whose update had not begun were not taken;
                one whose update had begun was finished and stays. `steps_done` and `cursor` tell.
        """
        if self._owner is not None and self._owner.pid != os.getpid():
            self._owner.refuse_elsewhere()
        try:
            return self._step(batch if not named else (*batch, Keywords(named)))
        finally:
            if INTERRUPTS.pending:
                INTERRUPTS.deliver()

    @INTERRUPTS.shielded
    def _step(self, batch: tuple[Batch, ...]) -> StepLoss:
        self._open_step()
        step = self._next_step(batch)
        check = self._self_check
        if step.number >= check.due_at or check.structure is not self._replicas.structure:
            self._check_contract(step)
        step.settings = self._record_settings()
        self._update.may_step_elsewhere = False
        self.position = self.position.after_step(self._drawn)
        return self._take(step)

    def backward(
        self,
        *batch: Batch,
        objective: UserObjective | None = None,
        accumulate: bool = False,
        **named: Batch,
    ) -> StepLoss:
        """Compute the gradients of one minibatch, as `step` does, and leave the update to the user.

            trainer.backward(X, y)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        Afterwards every `parameter.grad` holds the batch's mean gradient (None where the loss does
        not depend on the parameter), with the same bits on any devices and in every process. Any
        optimizer may be stepped then, in every process alike: the trainer's own too, also by a
        closure that calls this method. `before_update` and `after_update` are not called. A call
        counts as a step: its random numbers are its own, and `steps_done` counts it. It waits for
        the steps in flight, and for its own end.

        Args:
            batch: as for `step`.
            named: as for `step`.
            objective: computes the loss instead of the trainer's own, as for `Trainer`: of a second
                network, say, or with a penalty. It is checked as the first one is, when its code is
                used for the first time, and is never compiled.
            accumulate: whether to add the mean gradient to what `parameter.grad` holds, as torch's
                `backward` does, instead of replacing it.

        Returns:
            A handle of the batch's mean loss.

        Raises:
            EvenstepError: as for `step`. The parameters have the gradients that they had before.
        """
        if self._owner is not None and self._owner.pid != os.getpid():
            self._owner.refuse_elsewhere()
        try:
            whole = batch if not named else (*batch, Keywords(named))
            return self._backward(whole, objective, accumulate=accumulate)
        finally:
            if INTERRUPTS.pending:
                INTERRUPTS.deliver()

    @INTERRUPTS.shielded
    def _backward(
        self, batch: tuple[Batch, ...], objective: UserObjective | None, *, accumulate: bool
    ) -> StepLoss:
        check_flags(accumulate=accumulate)
        self._pipeline.wait()
        self._open_step()
        step = self._next_step(batch)
        step.updates, step.finish = False, self._update.leave_gradients
        if objective is not None:
            step.objective, step.may_compile = choose_objective(None, objective), False
            if self._others.is_new(objective):
                self._replicas.forget_objective()
                self._self_check.begin_again(step.number)
        if step.number >= self._self_check.due_at:
            self._check_contract(step)
        with kept_gradients(self.model, accumulate=accumulate):
            self.position = self.position.after_step(self._drawn)
            loss = self._pipeline.submit(step)
            self._pipeline.wait()
        if objective is not None:
            self._others.note(objective)
        if self._proxy:
            self._proxy.give_back()
        self._update.may_step_elsewhere = True
        self._reporter.add_step(step)
        self._reporter.tell()
        return loss

    def epoch(self, loader: Batches, *, whole: bool = False) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch; then the next epoch begins.

        A loop may take no step on a batch, or several: what was drawn is not yielded again, even
        after a resume. After a `break`, a new call yields the rest of the same epoch, which the log
        says once: `while trainer.cursor.epoch < epochs` counts whole epochs.

        The order follows from the trainer's seed and the epoch alone. While a loader that is not
        evenstep's is iterated, torch's, Python's and numpy's default generators, and generators
        that the loader, its samplers and its data set hold, are seeded from these two; afterwards
        they are as they were. `set_epoch` is called where a loader, data set or sampler has it.

        Args:
            loader: an `evenstep.data.Loader`, a `torch.utils.data.DataLoader` with any data set,
                samplers and workers, or any other iterable of batches: torchdata's
                `StatefulDataLoader`, a stream, a list. Of a map-style `DataLoader` with torch's own
                `collate_fn` each of several processes fetches its part of a batch; otherwise each
                fetches all of it. The batches of an `IterableDataset` depend on its number of
                workers.
            whole: with several processes, yield every whole batch in each of them, for a loop that
                draws random numbers for the examples of a batch: of a part it would draw others.

        Raises:
            BatchError: the epoch's last batch can't be trained on; raised before its first.
            InputError: the loader gives no batch, or an order that can't be repeated, or it was cut
                for several processes already (`DistributedSampler`).
            CheckpointError: the loader did not take back the state that a checkpoint has of it, or
                its data have changed.
        """
        self._refuse_fork()
        check_flags(whole=whole)
        INTERRUPTS.follow()
        source = self._sources.of(loader)
        if source.last_examples is not None:
            self._refuse_lonely(shard_bounds(source.last_examples, self.experiment.shards))
        self._wait_before_exchange()
        start = self.position.data or self._drawn
        batches = self._group.batches(source, start, lambda: self.steps_done, "epoch", whole=whole)
        self._epoch_loop.begins(start)
        began_s = time.perf_counter()
        for step, batch in enumerate(batches, start.step):
            self._note_drawn(Cursor(start.epoch, step), began_s)
            yield batch
            self._group.note("loading a batch")
            began_s = time.perf_counter()
        self._compare_ends(source)
        self._epoch_loop.ends()
        self._drawn = Cursor(start.epoch + 1)
        self.position = self.position.at(self._drawn)
        self._reporter.epoch_ended(start.epoch, self.steps_done)

    def _compare_ends(self, source: Source) -> None:
        self._wait_before_exchange()
        self._group.compare_ends(source, "epoch")

    @INTERRUPTS.uninterrupted
    def _note_drawn(self, place: Cursor, began_s: float) -> None:
        """Note that the batch at `place` was loaded since `began_s`, and will be yielded."""
        self._timekeeper.loaded(began_s)
        self.position = self.position.at(place)
        self._drawn = Cursor(place.epoch, place.step + 1)

    def batches(self, loader: Batches) -> Iterator[Batch]:
        """Yield the batches of the loader's epoch 0, to be given to `evaluate`.

        With several processes, each loads and yields its own part of every batch, as in `epoch`.
        """
        self._refuse_fork()
        self._wait_before_exchange()
        with contextlib.closing(self._new_sources()) as sources:
            source = sources.of(loader)
            yield from self._group.batches(source, Cursor(), lambda: self.steps_done, "batches")

    def _new_sources(self) -> Sources:
        return Sources(self.experiment.seed, locked=self._max_in_flight > 1)

    @INTERRUPTS.uninterrupted
    def evaluate(
        self,
        batches: Iterable[Batch],
        metrics: Mapping[str, Any],
        *,
        model: nn.Module | None = None,
    ) -> dict[str, Any]:
        """Return each metric over all `batches`, computed on every device in evaluation mode.

        Args:
            batches: each what `step` takes: a tuple or list of its arguments, or its one argument.
            metrics: name to `metric(output, *targets) -> (total, count)`; a trainer with an
                objective calls `metric(model, *batch)`. Or name to an object of torchmetrics, of
                which each shard updates a copy; their states are merged in the shards' order, and
                the object itself stays as it is. A `MetricCollection` will do, too.
            model: another module with the structure of the trainer's model, to evaluate instead of
                it, such as an average of its weights.

        Returns:
            A number for each metric; what an object's `compute` returns, if that is no number.

        Raises:
            BatchError: there is no batch, or none that counts.
            ModelError: `model` has another structure.
            InputError: the states of an object can't be merged.
        """
        self._refuse_fork()
        self._compare_states("evaluate")
        self._compare_other(model, "evaluate")
        return self._evaluator.evaluate(
            batches,
            metrics,
            position=self.position,
            open_batch=self._open_batches(),
            other=model,
        )

    @INTERRUPTS.uninterrupted
    def predict(
        self,
        batches: Iterable[Batch],
        forward: Forward = output_of,
        *,
        dim: int | None = None,
        model: nn.Module | None = None,
    ) -> Batch:
        """Return the model's output for every example, computed as `evaluate` does.

        Args:
            batches: as for `evaluate`. Of a Loader every example is taken once, in the order of the
                data set, whether it shuffles or not.
            forward: `forward(model, *batch)`, a tensor or a nesting of tensors with a row for each
                example; by default the model's output for the batch's first part.
            dim: the dimension of the outputs that the examples lie along. None: `batch_dim` or the
                first, whichever has an example's row in the outputs of all shards.
            model: as for `evaluate`.

        Returns:
            What `forward` returns, for all examples in their order, on the CPU, in every process.

        Raises:
            BatchError: there is no batch.
            ModelError: an output does not have one row for each example, or has as many along
                `batch_dim` as along the first dimension.
        """
        self._refuse_fork()
        self._compare_states("predict")
        self._compare_other(model, "predict")
        return self._evaluator.predict(
            batches,
            forward,
            dim,
            position=self.position,
            open_batch=self._open_batches(),
            other=model,
        )

    @INTERRUPTS.uninterrupted
    def waitall(self) -> None:
        """Wait for every step; afterwards the model may be read, and changed in any way.

        Raises:
            Exception: the error of a step in flight; it and those after it were not taken.
        """
        self._finish_steps()
        self._reporter.tell()

    def _finish_steps(self) -> None:
        self._refuse_fork()
        INTERRUPTS.follow()
        self._pipeline.wait()
        self._refuse_given_up()
        if self._proxy:
            self._proxy.give_back()
        self._replicas.mark_written()
        self._timekeeper.rest()

    def fingerprint(self, version: int = 1) -> str:
        """Return the SHA-256 of parameters, buffers and optimizer state (hexadecimal).

        Waits for the steps in flight.

        Args:
            version: 2 covers everything that decides the next step: also the learning rates and
                other settings of the optimizer's groups, and the extra state of modules.
        """
        if version not in (1, 2):
            raise InputError(f"got version={version!r}: there are versions 1 and 2")
        self.waitall()
        compute = fingerprints.fingerprint if version == 1 else fingerprints.fingerprint_2
        return compute(self.model, self.optimizer)

    def save(self, folder: str | Path, *, keep: int = 3, aside: bool = False) -> Path:
        """Save everything that training resumes from, in a new folder `step-…` in `folder`.

        With several processes, each must call this; the first one writes.

        Args:
            folder: the folder of this training's checkpoints; created if it doesn't exist.
            keep: the number of checkpoints that are kept, the newest ones.
            aside: return as soon as the state is copied, and write the copy while training
                continues. The copy takes as much memory again. An error is raised by a later
                `step` or `save`, by `wait_for_save`, or when the trainer is closed.

        Raises:
            SaveError: it can't be written; the checkpoints before it are whole.
            ModelError: the optimizer holds parameters that are not the model's any more.
        """
        self._finish_steps()
        try:
            self._reporter.tell()  # before a checkpoint that has these steps
        finally:
            path = self._save(Path(folder), keep, aside=aside)
        written = self._saves.pending if aside else None
        self._reporter.saved(path, self.steps_done, written)
        return path

    def _save(self, folder: Path, keep: int, *, aside: bool) -> Path:
        self._say_what_is_not_saved()
        refuse_strangers(self.model, self.optimizer)
        lost = self._compare_states_to_save()
        state = training_state.TrainingState(
            experiment=self.experiment,
            cursor=self.cursor,
            seeds_at=None if self.cursor == self.position.seeds_at else self.position.seeds_at,
            steps_done=self.steps_done,
            compiles=self._executor.programs.compiles if self._executor.programs else None,
            model=training_state.ModelState.of(self.model),
            optimizer=training_state.optimizer_state(self.optimizer),
            scheduler=self.scheduler.state_dict() if self.scheduler else None,
            optimizers=kinds_of(self.optimizer),
            within_rounding=self.within_rounding,
            data=encodable(self._sources.saved_at(self.cursor)),
            user_state=self._user_state.read(),
        )
        entries = fingerprints.named_state(self.model, self.optimizer)
        given = folder, state, entries, keep
        if aside and self._is_open and lost is None:
            if self._group.is_first:
                self._saves.start(*given)
            return checkpoint_of(folder, self.steps_done)
        self.wait_for_save()
        if lost is not None:
            if self._group.is_first:
                write_state(*given)
            raise lost
        return self._group.by_the_first(lambda: write_state(*given))

    def _say_what_is_not_saved(self) -> None:
        """Log once what a training with a data loader of the user's own must restore by itself."""
        if self._was_saved or not self.steps_done or self._drawn != Cursor():
            return
        self._was_saved = True
        lacks = []
        if not self._user_state.has_loader:
            lacks.append(
                "the place in a data loader of your own (it does with trainer.epoch(loader)): "
                "after resuming, go on with batch number trainer.cursor.step"
            )
        if not self._user_state.has_generators:
            lacks.append(
                "the states of random, numpy.random and torch's default generator (it does with "
                "Trainer(state={'random': evenstep.data.GeneratorStates()}))"
            )
        if lacks:
            logger.warning("the checkpoint does not hold %s", "; nor ".join(lacks))

    def wait_for_save(self) -> None:
        """Wait until the checkpoint that `save(aside=True)` has begun is on the disk.

        Raises:
            SaveError: it could not be written; the checkpoints before it are whole.
        """
        self._refuse_fork()
        self._saves.wait()

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        **options: Unpack[TrainerOptions],
    ) -> Trainer:
        """Return a trainer that resumes where a saved one stopped, bit for bit, on any devices.

        Args:
            folder: a folder of checkpoints, of which the newest is loaded, or one checkpoint.
            model: a model built as the saved one was; its values are overwritten.
            optimizer: an optimizer built as the saved one was; its state is overwritten.
            loss: as for `Trainer`.
            options: as for `Trainer`. The experiment is the checkpoint's: choices that differ from
                it are refused, devices and all other options may differ.

        Raises:
            CheckpointError: missing, damaged, or of another model, optimizer or experiment; model,
                optimizer and scheduler are as they were.
        """
        saved = training_state.read_training_state(Path(folder))
        if "hybridize" in options:
            options["compile"] = options.pop("hybridize")
        given = {} if options.get("experiment") else dataclasses.asdict(saved.experiment)
        trainer = cls(model, optimizer, loss, **{**given, **options})
        with saved.unchanged_on_error(model, optimizer, trainer.scheduler):
            trainer._restore(saved)
        return trainer

    def ask_to_stop(self) -> None:
        """Make `shall_stop` true, in all processes before the same step."""
        self._refuse_fork()
        self._group.ask_to_stop()

    @property
    def shall_stop(self) -> bool:
        """Whether no further step shall be taken, because `ask_to_stop` was called."""
        self._refuse_fork()
        return self._group.shall_stop(self.steps_done, self._max_in_flight)

    @property
    def contract(self) -> ContractReport | None:
        """What the last check of the contract has found out; None before it."""
        return self._self_check.report

    @property
    @INTERRUPTS.uninterrupted
    def trace(self) -> Trace:
        """What ran where and when; `trace.save(file)` writes it for Perfetto."""
        self._refuse_fork()
        return self._timekeeper.trace

    @property
    def hybridized(self) -> Hybridized | None:
        """The result of compiling shards, from the first step on; None without `compile`."""
        programs = self._executor.programs
        return programs.result if programs is not None else None

    @property
    def compile_s(self) -> float:
        """The seconds spent on compiling so far; they are no part of any step's time."""
        return self.hybridized.compile_s if self.hybridized is not None else 0.0

    @INTERRUPTS.uninterrupted
    def shares(self) -> tuple[DeviceShares, ...]:
        """Return for each device where the time of the training steps went."""
        self._refuse_fork()
        return self._timekeeper.shares()

    @property
    def busy_s(self) -> list[float]:
        """For each device, the seconds of training steps in which it had work."""
        return [own.compute_s + own.sum_s + own.update_s for own in self.shares()]

    # ---- the parts of the methods above

    def _refuse_lonely(self, bounds: Sequence[tuple[int, int]]) -> None:
        if self.experiment.batch_norm == "shard":
            refuse_single_example_shards(self.model, bounds)

    def _open_step(self) -> None:
        """Get ready for a step: nothing has failed, states agree, replicas are up to date."""
        if self._saves.pending is not None:
            self._saves.check()
        if not self.position.steps_done % _FOLLOW_EVERY:
            INTERRUPTS.follow()
        if not self._group.is_alone and self._agreement.is_state_due(self.steps_done):
            self._compare_states("step")
        self._open_flight(leave=self._max_in_flight - 1, may_be_written=True)

    def _open_flight(self, leave: int = 0, *, may_be_written: bool = False) -> None:
        """Wait until at most `leave` steps are in flight, and bring the replicas up to date.

        Args:
            leave: the number of steps.
            may_be_written: whether the user may have written to the parameters past torch's version
                counters since the replicas were brought up to date.
        """
        if not self._is_open and self._owner is not None:
            raise ClosedError(
                "the trainer was closed, at the end of its `with` or by `close`: indent the call "
                "into the `with`, or open the trainer again by `with trainer:`"
            )
        if not self._is_open:
            raise ClosedError(
                "the trainer is not open: use it as `with evenstep.Trainer(...) as trainer:`, or "
                "as `trainer = evenstep.Trainer(...).open()`"
            )
        if self._side_by_side or threading.get_ident() in self._engine.lanes.threads:
            self._engine.refuse_inside("take a step, or evaluate")
        if self._max_in_flight > 1 and self._sources.draws_in == threading.get_ident():
            raise InputError(
                "the loader that trainer.epoch iterates calls the trainer while it draws a batch, "
                "beside steps in flight: call it in the loop, or use max_in_flight=1"
            )
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise InputError(
                "torch.autocast around a step is not propagated to the worker threads: use "
                'Trainer(precision="bf16") instead'
            )
        if self._engine.given_up:
            self._refuse_given_up()
        if has_own_modes():
            refuse_modes(self.devices[0].torch_device)
        if self._pipeline.steps:
            may_compile = self._executor.programs is not None  # beside nothing in flight
            self._pipeline.wait(leave=0 if may_compile else leave)
        if self._pipeline.steps and self._user_changed_something():
            self._pipeline.wait()
        if not self._pipeline.steps:
            if may_be_written:
                self._replicas.mark_written()
            self._follow_user()

    def _open_batches(self) -> Callable[[], None]:
        """Return what prepares the replicas for each batch of an evaluation."""
        is_first = itertools.chain([True], itertools.repeat(False))
        return lambda: self._open_flight(may_be_written=next(is_first))

    def _user_changed_something(self) -> bool:
        return self._replicas.is_outdated or (self._proxy is not None and not self._proxy.fits)

    def _follow_user(self) -> None:
        """Bring replicas and proxy up to what the user did to the model and the optimizer."""
        if self._replicas.refresh():
            self._in_first_lane(self._update.update_copies)
        if self._replicas.were_rebuilt:
            check_followed(self.model, self.optimizer, self._known)
            self._known = {*self.model.parameters()}
            self._replicas.were_rebuilt = False
        if self._proxy:
            self._proxy.mark() if self._proxy.fits else self._proxy.renew()

    def _next_step(self, batch: Batch) -> Step:
        """Return the step that trains on `batch` at the current position."""
        is_plain = {*map(type, batch)} <= _TENSORS
        if not is_plain:
            batch = nest(batch, self.experiment.batch_dim)
        if self._max_in_flight > 1:
            batch = nest(in_own_memory(batch), self.experiment.batch_dim)
        cut = self._group.cut(batch, self.experiment.shards, self.position.steps_done)
        if cut.part.examples < 2 * self.experiment.shards:
            self._refuse_lonely(cut.bounds)
        return Step.of(
            self.position,
            cut,
            self.experiment.seed,
            objective=self._objective,
            finish=self._update,
            observe=self.on_shard,
            digest=NO_DIGEST if self._group.is_alone else self._digest_of(batch),
            may_compile=cut.can_join,
        )

    def _digest_of(self, batch: Batch) -> int:
        """Return the digest of a batch, if the processes compare it in this step."""
        return self._group.digest_of(batch, is_due=self._agreement.is_due(self.steps_done))

    def _check_contract(self, step: Step) -> None:
        """Check the code on the batch of a step that has not begun."""
        self._pipeline.wait()
        self._follow_user()
        attempt = step.attempt
        self._self_check.run(step.number, attempt.cut, attempt.seed, step.objective)
        self._timekeeper.rest()

    def _abandoned(self, step: Step) -> None:
        """Go back to the position before `step`, which was not taken.

        Its batch may be trained on again, until the loop draws the next one.
        """
        if step.number <= self.position.steps_done:  # one before it may be abandoned, too
            self.position = step.position
        if self._proxy:
            self._proxy.renew()

    def _compare_states(self, call: str) -> None:
        """Make sure that all processes are in the same state (a flipped bit would spread)."""
        if self._group.is_alone:
            return
        if self._group.differences:
            self.waitall()  # what is compared is written to
        else:
            self._pipeline.wait()
        self._agreement.compare_states(self._group, self.steps_done, call)

    def _compare_other(self, model: nn.Module | None, call: str) -> None:
        """Make sure that all processes evaluate the same other model."""
        if model is not None and not self._group.is_alone:
            state = dict(model.state_dict())
            interruptible(self._group.compare_states, lambda: (state, {}), self.steps_done, call)

    def _compare_states_to_save(self) -> PeerError | None:
        """Compare states before a checkpoint; return the error if another process is lost.

        What this process has is worth a checkpoint then, too.
        """
        try:
            self._compare_states("save")
        except DivergedError:
            raise
        except PeerError as error:
            if error.rank is None:
                raise
            return error
        return None

    def _note_rounding(self, reason: str) -> None:
        """Note that results are equal within rounding only."""
        self.within_rounding = True
        note = f"{reason}: {WITHIN_ROUNDING}"
        if note not in self.notes:
            self.notes.append(note)

    @INTERRUPTS.uninterrupted
    def _wait_before_exchange(self) -> None:
        """Wait for the steps in flight before this thread exchanges messages with processes."""
        if not self._group.is_alone:
            self._pipeline.wait()

    def _facts(self) -> dict[str, object]:
        """Return what must be the same in every process."""
        return {
            **dataclasses.asdict(self.experiment),
            "allow_rounding": self._allow_rounding,
            **self._agreement.facts(),
            "the steps done": self.steps_done,
            "the place in the data": dataclasses.astuple(self.cursor),
            "the place of the seeds": dataclasses.astuple(self.position.seeds_at),
        }

    def _minimise(self, step: Step) -> StepLoss:
        """Update with an optimizer that evaluates the batch as often as it likes (LBFGS).

        Its own arithmetic runs in the calling thread, with the devices' number of threads.
        """
        evaluate = functools.partial(self._evaluate_once, step)
        closure = Closure(evaluate, self._update, self._replicas)
        self._pipeline.wait()
        after, self.position = self.position, step.position
        with (
            training_state.rolled_back_on_error(self.model.parameters(), self.optimizer),
            intra_op_threads(self.experiment.threads),
        ):
            self._update.minimise(closure)
        assert closure.first is not None
        assert closure.root is not None
        self.position = after
        self._in_first_lane(functools.partial(self._update.close_minimised, closure.root))
        step.loss, step.outputs = closure.first.loss, closure.first.outputs
        step.is_taken = step.finished = True
        step.release()
        return StepLoss(step, lambda step: None)

    def _evaluate_once(self, step: Step, finish: Finish) -> Step:
        self._follow_user()
        evaluation = dataclasses.replace(step, finish=finish, attempt=step.attempt.again())
        self._pipeline.submit(evaluation).wait_to_read()
        step.attempt.clock.add(evaluation.attempt.clock)
        return evaluation

    def _in_first_lane(self, function: Callable[[], None]) -> None:
        """Run `function` where the update is done, and wait for it, also if Ctrl-C is pressed."""
        task = Task(function, lane=self._engine.first_lane, modes=PLAIN, quiet=True)
        self._engine.submit_tasks([task])
        self._engine.drain(task, patience_s=math.inf)
        if task.error is not None:
            raise task.error

    def _refuse_given_up(self) -> None:
        """Refuse to go on if a device is at work that was given up, and that training needs."""
        engine = self._engine
        if not engine.given_up:
            return
        may_go_on = self._replicas.drop_lanes(engine.lost_lanes)
        if self._pipeline.left_an_update or not may_go_on:
            lost = ", ".join(str(self.devices[lane]) for lane in sorted(engine.given_up))
            raise DeviceLostError(
                f"Ctrl-C was pressed again while {lost} was at work on the model, and was not "
                f"waited for: load the last checkpoint in a new process"
            )

    def _restore(self, saved: training_state.TrainingState) -> None:
        saved.check_experiment(self.experiment)
        self._user_state.check(saved.user_state)
        saved.restore(self.model, self.optimizer, self.scheduler)
        seeds = saved.seeds_at or saved.cursor
        data = saved.cursor if saved.seeds_at else None
        self.position = Position(saved.steps_done, seeds.epoch, seeds.step, data)
        self._drawn = saved.cursor
        self._sources.restore(saved.data)
        if saved.within_rounding and not self.within_rounding:
            self._note_rounding("the checkpoint is of devices, or processes, of other kinds")
        if self._executor.programs:
            self._executor.programs.compiles = saved.compiles
        saved.check_fingerprint(self.fingerprint())
        self._user_state.restore(saved.user_state)
