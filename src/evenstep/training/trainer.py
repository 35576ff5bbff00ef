"""The trainer: the user's model and optimizer, stepped on every device.

A step is the recipe of Dive into Deep Learning, "Training on Multiple GPUs" (`train_batch`): split
the batch, compute losses and gradients side by side, sum them, update; here over shards instead of
devices.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.nesting import Keywords, Nesting
from evenstep.batch.own_shards import in_own_memory
from evenstep.callbacks import Callback
from evenstep.checkpoint import fingerprint as fingerprints
from evenstep.checkpoint.restore import unchanged_on_error
from evenstep.checkpoint.training_state import read_training_state
from evenstep.checkpoint.user_state import Stateful, UserState
from evenstep.contract import ContractReport, SelfCheck
from evenstep.contract.lone_examples import LoneExamples
from evenstep.contract.outside.outer_graphs import refuse_wanted_gradient
from evenstep.data import Cursor
from evenstep.data.adapters.sources import Batches
from evenstep.devices import Devices, find_devices
from evenstep.devices.facts import Facts
from evenstep.distributed import job_share, local_share
from evenstep.distributed.step_report import NO_DIGEST
from evenstep.engine import streams
from evenstep.engine.interrupts import INTERRUPTS, SIGNALS, handler_of
from evenstep.errors import InputError, hide_own_frames, hides_own_frames
from evenstep.limits import Precision
from evenstep.nn.slice_runners import Exchanged
from evenstep.options import Experiment, Faults, Layout
from evenstep.private_torch.names import refuse_missing
from evenstep.profiling.accounting import Shares
from evenstep.profiling.trace import Trace
from evenstep.replicas import (
    Members,
    check_trainable,
    complete,
    is_left,
    move_home,
    note_left,
    own_gradients,
    with_safe_format,
)
from evenstep.shard.compile_policy import Hybridized
from evenstep.shard.evaluation import Forward, measure_model, measure_output, output_of
from evenstep.shard.loss import (
    Loss,
    Objectives,
    UserObjective,
    choose_objective,
    of_unlike_shards,
)
from evenstep.shard.partial_sum import PartialSum
from evenstep.steps.owners.partition import refuse_backward, state_of_others
from evenstep.steps.step import Position, Step, StepLoss
from evenstep.steps.update import Hook
from evenstep.training.agreement import Agreement
from evenstep.training.epochs import Epochs, RestOfEpoch
from evenstep.training.evaluation.evaluator import Evaluator
from evenstep.training.habits import KEYWORDS, Habits, MakesATrainer
from evenstep.training.notes import Notes, note_trained
from evenstep.training.reporting import check_callbacks
from evenstep.training.saver import Saver
from evenstep.training.session import Session
from evenstep.training.setup.arguments import (
    Chosen,
    TrainerOptions,
    check_flags,
    check_functions,
    check_kinds,
    check_options,
    check_scheduler,
    refined,
    resumed,
)
from evenstep.training.setup.combinations import (
    chosen_stages,
    refuse_combinations,
    refuse_unfit_slices,
)
from evenstep.training.setup.parts import choose_parts

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TENSORS = {torch.Tensor}


class Trainer(Habits):
    """Trains a model on many devices, with a result that does not depend on how many there are.

        model = evenstep.models.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = nn.CrossEntropyLoss()
        loader = evenstep.data.Loader(evenstep.data.digits(), batch_size=64)
        with evenstep.Trainer(model, optimizer, loss) as trainer:
            for X, y in trainer.epoch(loader):
                trainer.step(X, y)

    Use it with `with` (or `open`), which starts and stops a worker thread for each device. In a
    script that torchrun starts several times, `with` also finds the other processes: they train
    one model together, each on its own devices. The module and the optimizer remain ordinary torch
    objects: read, change and save them between steps, and step any scheduler after `step`.
    Gradient hooks (`parameter.register_hook`) are called once for each step, with the batch's mean
    gradient.

    `model`, `optimizer` and `loss` may be given by position, all other arguments by name.

    Args:
        model: any `nn.Module`; it is moved to the first device.
        optimizer: any `torch.optim` optimizer over parameters of `model`.
        loss: a mean-reduced `loss(output, *targets)`, for batches `(input, *targets)`.
        objective: instead of `loss`, for everything else: `objective(model, *batch) ->
            (total, count)`, which must call the `model` that it is given. It may also return one
            scalar, the mean over the examples. A dict of further outputs may follow either.

    Args: What the result depends on
        shards: V, the number of shards that every minibatch is cut into; at most 65,536. By
            default 8.
        seed: the seed of the random ops in the model. By default 0.
        precision: "fp32" for the parameters' own dtype (the default), "bf16" for autocast.
        experiment: all choices that the result depends on: these three, and those that are seldom
            made, such as `Experiment(clip_norm=1.0)`. A choice is given in one place only.

    Args: Where and how the work is done, without effect on the result
        devices: "auto", a number, a name such as "cpu:1", or a list of names (see `find_devices`).
        layout: how the work is divided, without effect on the result: stages, slices, owners.
        max_in_flight: the number of steps that may be unfinished at once, at most 1,000. With 1, a
            step is finished when `step` returns. With 2, `step` returns at once, and the next batch
            is loaded and copied meanwhile; call `waitall` before you read or change the model.
            Schedulers and changes of the optimizer's groups still take effect at the right step.
            An optimizer that contains another one is refused.
        faults: how long to wait for what is late, and when to check what.

    Args: Your own code and objects
        before_update: called with the module when each `parameter.grad` holds the batch's mean
            gradient and the optimizer has not stepped yet: the place for clipping.
        after_update: called with the module after the optimizer's step and before the next step's
            shards begin: the place for an average of the parameters (EMA) or a momentum encoder,
            with any number of steps in flight. It runs in a worker thread, in every process.
            What it writes into the module (also parameters with `requires_grad=False`) reaches all
            devices and the checkpoint; what it writes elsewhere (an `AveragedModel`) is yours to
            save, after `waitall`. If it raises, the optimizer's update has already been made, and
            the step counts.
        scheduler: a learning-rate scheduler of `optimizer`, saved in checkpoints and restored from
            them.
            The trainer never steps it: call its `step` yourself.
        state: objects of your own, by name, that are saved in checkpoints and restored from them,
            such as `{"ema": ema, "random": evenstep.data.GeneratorStates()}`. Each needs
            `state_dict` and `load_state_dict`, and a state made of tensors and plain values. With
            several processes, the states of the first one are saved, and restored in all.
        callbacks: objects that are called after steps, epochs and checkpoints, to log or to show
            them (see `evenstep.callbacks.Callback`). They have no effect on the result.

    Attributes:
        notes: lines about devices and choices for the user, logged when the trainer is opened.
        on_shard: for debugging: called in the worker threads as `on_shard(shard, value)` with the
            gradients and buffers of each shard, before they are summed. While it is set, shards
            are divided equally among the devices, and no device takes over another one's shards.

    Raises:
        InputError: the model, the optimizer or an option can't be used; nothing was changed.
    """

    @functools.partial(hides_own_frames, habits=KEYWORDS)
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        *,
        objective: UserObjective | None = None,
        devices: Devices = "auto",
        shards: int | None = None,
        seed: int | None = None,
        precision: Precision | None = None,
        experiment: Experiment | None = None,
        layout: Layout | None = None,
        faults: Faults | None = None,
        before_update: Hook | None = None,
        after_update: Hook | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        state: Mapping[str, Stateful] | None = None,
        callbacks: Sequence[Callback] = (),
        max_in_flight: int = 1,
    ) -> None:
        refuse_missing()
        experiment, layout, faults = check_options(experiment, layout, faults)
        experiment = refined(experiment, shards=shards, seed=seed, precision=precision)
        check_functions(before_update=before_update, after_update=after_update)
        check_kinds(model, optimizer)
        complete(optimizer)
        check_scheduler(scheduler, optimizer)
        callbacks = check_callbacks(callbacks)
        self.devices = find_devices(devices, threads=experiment.threads, share=local_share())
        chosen = Chosen(
            experiment=experiment,
            devices=self.devices,
            layout=layout,
            faults=faults,
            max_in_flight=max_in_flight,
        )
        refuse_combinations(chosen, is_alone=job_share()[1] == 1)
        refuse_unfit_slices(chosen, model)
        self._objective = choose_objective(loss, objective)
        self._objective_of_unlike = of_unlike_shards(self._objective)
        self._others = Objectives()
        self._nesting = Nesting(experiment.batch_dim)
        members = Members.of(model)
        check_trainable(members, optimizer)
        staged = chosen_stages(chosen, model)
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        chosen = dataclasses.replace(chosen, experiment=with_safe_format(experiment, members))
        self.experiment = dataclasses.replace(chosen.experiment)  # all of it counts as given
        self.on_shard: Callable[[int, PartialSum], None] | None = None
        own = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        user_state = UserState(state, {k: v for k, v in own.items() if v is not None})
        move_home(model, members, optimizer, self.devices[0])
        hooks = before_update, after_update
        given = model, optimizer, loss or objective
        parts = choose_parts(*given, chosen, hooks, callbacks, staged)
        self._max_in_flight = max_in_flight
        self._progress, self._timekeeper = parts.progress, parts.timekeeper
        self._engine, self._replicas, self._executor = parts.engine, parts.replicas, parts.executor
        self._update, self._pipeline, self._reporter = parts.update, parts.pipeline, parts.reporter
        self._take, self._partition, self._left = parts.take, parts.partition, parts.left
        notes = Notes(self.devices[:1] if layout.has_slices else self.devices, self.experiment)
        notes.note_copies(parts.replicas.held_elsewhere)
        self.notes = notes.lines
        self._notes = notes
        self._self_check = SelfCheck(
            faults,
            self.experiment,
            parts.replicas,
            parts.engine,
            side_by_side=parts.executor.side_by_side,
        )
        self._agreement = Agreement(model, optimizer, loss, parts, chosen, self._self_check)
        self._lone_examples = LoneExamples(self.experiment, parts.replicas, parts.engine)
        self._epochs = Epochs(parts, chosen, self._lone_examples)
        self._saver = Saver(
            model, optimizer, user_state, parts, self._agreement, self._epochs.sources, notes
        )
        others = self._saver.writer, self._saver.other_optimizers, self._epochs
        self._session = Session(optimizer, parts, chosen, self._agreement, notes, others)
        measure = measure_model if loss is None else measure_output
        self._evaluator = Evaluator(
            model, parts.executor, measure, parts.progress, parts.values, self._open_flight
        )

    def __repr__(self) -> str:
        model, optimizer = type(self.model).__name__, type(self.optimizer).__name__
        place, steps = self.cursor, self.steps_done
        return (
            f"<Trainer of {model} with {optimizer} on {', '.join(map(str, self.devices))}: "
            f"{self.experiment.shards} shards, seed {self.experiment.seed}; "
            f"{steps} step{'s' * (steps != 1)} done, next is batch {place.step} of epoch "
            f"{place.epoch}{'' if self._session.is_open else '; not open'}>"
        )

    @INTERRUPTS.shielded
    def __enter__(self) -> Trainer:
        """Start the worker threads, and find the other processes."""
        was_open = self._session.is_open
        try:
            self._session.open()
            return self
        except BaseException as error:
            if self._session.is_open and not was_open:
                self._session.close(type(error), error)
            if isinstance(error, Exception):
                hide_own_frames(error)
            raise

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
        try:
            self._session.close(kind, error, traceback)
        except BaseException as late:
            if self._session.is_open:  # it came from outside, before anything was closed
                self._session.close(type(late), late)
            raise
        finally:
            INTERRUPTS.deliver()

    @hides_own_frames
    def open(self) -> Trainer:
        """Start the worker threads, as `with` does, and return this trainer.

            trainer = evenstep.Trainer(model, optimizer, loss).open()

        For notebooks, and scripts without an indented block. `close` closes the trainer, and so
        does the end of the program. With steps in flight, call `close`: an error that appears
        only at the end of the program is printed, but does not change the exit status.
        """
        self.__enter__()
        atexit.register(self._session.close_with_program)
        return self

    def close(self) -> None:
        """Finish the steps in flight and stop the threads, as the end of `with` does.

            trainer = evenstep.Trainer(model, optimizer, loss).open()
            trainer.step(X, y)
            trainer.close()

        The model stays usable. Calling `close` again has no effect.
        """
        self._session.refuse_here("close")
        if self._session.is_open:
            self.__exit__(None, None, None)

    @property
    def cursor(self) -> Cursor:
        """The place in the data: batch number `step` of `epoch` is the next to train on.

            while trainer.cursor.epoch < 3:
                for X, y in trainer.epoch(loader):
                    trainer.step(X, y)

        It counts the batches that `Trainer.epoch` has yielded. The latest one counts only once a
        step is taken on it or the next batch is drawn, so a loop may save or stop before that step.
        If you iterate a loader yourself, it counts the steps.
        """
        return self._progress.position.cursor

    @property
    def position(self) -> Position:
        """Where the training stands.

            print(trainer.position.steps_done, trainer.position.cursor)

        The steps done, the epoch and the batch, and the place in the data.
        """
        return self._progress.position

    @position.setter
    def position(self, position: Position) -> None:
        self._progress.position = position

    @property
    def within_rounding(self) -> bool:
        """Whether results are equal to those of other devices within rounding, not bit for bit.

            print(trainer.within_rounding, trainer.notes)

        A note says why.
        """
        return self._notes.within_rounding

    @property
    def facts(self) -> Facts:
        """What the bits of this training depend on besides the data: values by name, by kind.

            for name, value in trainer.facts["experiment"].items():
                print(name, value)

        Processes compare them when they open their trainers; a checkpoint holds them, and a resume
        compares them again (see docs/promise.md).
        """
        return self._agreement.resumed_facts()

    @property
    def steps_done(self) -> int:
        """The number of steps since the start of training.

            for X, y in trainer.epoch(loader):
                trainer.step(X, y)
                if trainer.steps_done % 10 == 0:
                    trainer.save("runs/a")

        Those of all epochs count, and those before a resume.
        """
        return self._progress.position.steps_done

    def step(self, *batch: Batch, **named: Batch) -> StepLoss:
        """Train on one minibatch: split, compute the shards, sum, update.

            for X, y in trainer.epoch(loader):
                mean = trainer.step(X, y)
            print(float(mean))

        Gradients that you have put into `.grad` since the last update (`penalty.backward()`) are
        added to the step's mean gradient. What a step, `backward` or an optimizer has left there is
        replaced.

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
            BatchError: the batch can't be cut into shards, or a shard of one example is too few for
                BatchNorm, in this batch or in the epoch's last.
            ContractError: the code breaks the contract of a step; the message names what does.
            InputError: a gradient of your own was added to one that a step had left, or set with a
                step in flight; or what the code reads outside of the model has changed then.
            NonFiniteLossError: a shard's loss is NaN or infinite. As after Ctrl-C and every other
                error before the update, the model is as it was before the step. With
                `max_in_flight` above 1, a step's error is raised when you wait for it: by its
                handle, a later `step`, or `waitall`; the steps after it were not taken.
            KeyboardInterrupt: Ctrl-C was pressed. A step whose update had begun was finished; the
                others in flight were not taken. `steps_done` and `cursor` count accordingly.
            ClosedError: an earlier step failed within its update: load the last checkpoint.
            BaseException: your own code has raised it. Before the optimizer's step (in the model, a
                hook, `before_update`), the step was not taken. After it (in a hook that the
                optimizer calls then, `after_update`, a callback), the step was taken and counts,
                which a note of the error says. If the optimizer itself has raised it, or what runs
                before it had written parameters, the state is between two steps: the trainer
                refuses to train, evaluate or save from there, and a note says so. LBFGS is put
                back to where the step began.
        """
        owner = self._session.owner
        if owner is not None and owner.pid != os.getpid():
            owner.refuse_elsewhere()
        try:
            return self._step(batch if not named else (*batch, Keywords(named)))
        except Exception as error:
            hide_own_frames(error)
            raise
        finally:
            if INTERRUPTS.pending:
                INTERRUPTS.deliver()

    @INTERRUPTS.shielded
    def _step(self, batch: tuple[Batch, ...]) -> StepLoss:
        if INTERRUPTS.is_handling:
            INTERRUPTS.refuse_in_handler("step")
        turn = self._session.turn
        if not turn.acquire(blocking=False):
            self._session.refuse_two_threads()
        try:
            if self._pipeline.steps:
                self._update.refuse_own_gradients()
            self._open_step(leave=self._max_in_flight - 1)
            step = self._next_step(batch)
            if not self._pipeline.steps:
                step.own = own_gradients(self._replicas.home)
            if step.attempt.cut.part.examples < self._lone_examples.looked_at_below:
                self._refuse_lone_examples(step)
            if not self.model.training:
                self._notes.say_mode(self.model)
            check = self._self_check
            if step.number >= check.due_at or check.structure is not self._replicas.structure:
                self._check_contract(step)
            if not self._executor.group.is_alone:
                self._agreement.compare_results(step)
            step.settings = self._update.record()
            self._update.may_step_elsewhere = False
            return self._take(step)
        finally:
            self._replicas.computed.show()
            turn.release()

    @hides_own_frames
    @INTERRUPTS.shielded
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
        not depend on the parameter), with the same bits on any devices and in every process. Then
        step any optimizer, the trainer's or a different one, in the same way in every process. A
        closure given to `optimizer.step` may call this method. `before_update` and `after_update`
        are not called. Each call counts as a step: it draws new random numbers and raises
        `steps_done` by one. It waits for the steps in flight, and until the gradients are computed.

        Args:
            batch: as for `step`.
            named: as for `step`.
            objective: as for `Trainer`, used instead of the trainer's own in this call, for example
                the loss of a second network. Its code is checked when it is used for the first
                time, as the trainer's is, and is never compiled.
            accumulate: whether to add the mean gradient to `parameter.grad`, as torch's `backward`
                does, instead of replacing it.

        Returns:
            A handle of the batch's mean loss.

        Raises:
            EvenstepError: as for `step`. After every error, and after Ctrl-C, the call was not
                made: gradients, buffers and `steps_done` are as they were. (With several processes
                it stays made if all of them have the gradients; then `steps_done` has grown.)
                Ctrl-C that comes too late for that is raised when the optimizer has stepped. If
                your own `optimizer.step` fails afterwards, the trainer does not notice it.
        """
        try:
            return self._backward(batch, objective, accumulate, named)
        except BaseException:
            INTERRUPTS.deliver()
            raise

    def _backward(
        self,
        batch: tuple[Batch, ...],
        objective: UserObjective | None,
        accumulate: bool,
        named: dict[str, Batch],
    ) -> StepLoss:
        self._session.refuse_here("backward")
        check_flags(accumulate=accumulate)
        if self._partition is not None:
            refuse_backward()
        with self._session.one_thread():
            self._open_step(leave=0)
            step = self._next_step(batch if not named else (*batch, Keywords(named)))
            step.updates, step.finish = False, self._update.leave_gradients
            is_new = objective is not None and self._others.is_new(objective)
            if objective is not None:
                step.objective, step.may_compile = choose_objective(None, objective), False
                if is_new:
                    self._replicas.forget_objective()
                    self._self_check.begin_again(step.number)
            if step.attempt.cut.part.examples < self._lone_examples.looked_at_below:
                self._refuse_lone_examples(step)
            if step.number >= self._self_check.due_at:
                self._check_contract(step)
            is_alone = self._executor.group.is_alone
            if not is_alone:
                self._agreement.compare_results(step, is_new=is_new)
            with self._left.whole(step, accumulate=accumulate, is_alone=is_alone):
                loss = self._pipeline.take_now(step)
                if objective is not None:
                    self._others.note(objective)
                self._update.give_back()
                INTERRUPTS.check()
            note_left(self._replicas.home.parameters)
            self._update.may_step_elsewhere = True
            self._reporter.add_step(step)
            self._reporter.call_back()
            return loss

    @hides_own_frames
    def epoch(self, loader: Batches, *, whole: bool = False) -> RestOfEpoch:
        """Return the remaining batches of the current epoch; then the next epoch begins.

            for X, y in trainer.epoch(loader):
                trainer.step(X, y)

        They can be looped over once: call `epoch` anew in each epoch. Their `len` is their number,
        if the loader has a length, so `tqdm(trainer.epoch(loader))` shows how much is left.

        A loop may take no step on a batch, or several: a batch is not yielded again, even after
        a resume. After a `break`, a new call yields the rest of the same epoch, and a log line says
        so once: write `while trainer.cursor.epoch < epochs` to count whole epochs.

        The order depends only on the trainer's seed and the epoch. While another library's loader
        is iterated, the default generators of torch, Python and numpy, and those that the loader,
        its samplers and its data set hold, are seeded from these two; afterwards their states are
        restored. `set_epoch` is called on every loader, data set and sampler that has it.

        Args:
            loader: an `evenstep.data.Loader`, a `torch.utils.data.DataLoader` with any data set,
                samplers and workers, or any other iterable of batches: torchdata's
                `StatefulDataLoader`, a stream, a list. With several processes, each fetches only
                its part of a batch from a map-style `DataLoader` with torch's own `collate_fn`, and
                whole batches from all others. The batches of an `IterableDataset` depend on its
                number of workers.
            whole: with several processes, yield whole batches in each of them. A loop that draws
                random numbers for the examples of a batch needs this: it would draw other numbers
                for a part.

        Raises:
            InputError: the loader gives no batch, or an order that can't be repeated, or it already
                divides the data among processes (`DistributedSampler`); or a loop over what was
                returned has ended, and another one begins.
            CheckpointError: the loader could not restore its state from a checkpoint, or its data
                have changed.
        """
        check_flags(whole=whole)
        return RestOfEpoch(loader, self._epochs.here.step, self._draw_epoch(loader, whole=whole))

    def _draw_epoch(self, loader: Batches, *, whole: bool) -> Generator[Batch, None, None]:
        self._session.refuse_here("epoch")
        try:
            yield from self._epochs.epoch(loader, whole=whole)
        except Exception as error:
            hide_own_frames(error)
            raise

    def batches(self, loader: Batches) -> Iterator[Batch]:
        """Yield the batches of the loader's epoch 0, to be given to `evaluate`.

            metrics = {"accuracy": evenstep.metrics.accuracy}
            trainer.evaluate(trainer.batches(loader), metrics)

        With several processes, each loads and yields its own part of every batch, as in `epoch`.
        """
        self._session.refuse_fork()
        try:
            yield from self._epochs.batches(loader)
        except Exception as error:
            hide_own_frames(error)
            raise

    @hides_own_frames
    @INTERRUPTS.uninterrupted
    def evaluate(
        self,
        batches: Iterable[Batch],
        metrics: Mapping[str, Any],
        *,
        model: nn.Module | None = None,
    ) -> dict[str, Any]:
        """Return each metric over all `batches`, computed on every device in evaluation mode.

            metrics = {"accuracy": evenstep.metrics.accuracy}
            print(trainer.evaluate(loader, metrics)["accuracy"])

        Args:
            batches: an iterable of batches, each a tuple or list of the arguments of `step`, or its
                one argument. With several processes, each loads its own part of every batch of an
                `evenstep.data.Loader`, or of what `batches` yields, and whole batches of others.
            metrics: name to `metric(output, *targets) -> (total, count)`; a trainer with an
                objective calls `metric(model, *batch)`. Or name to an object of torchmetrics: a
                copy is updated with the output and the targets of each whole batch, on the CPU. A
                `MetricCollection` is accepted, too.
            model: a different module with the structure of the trainer's model, such as an average
                of its weights, to evaluate instead.

        Returns:
            The value of each metric: a number, or whatever the `compute` of an object returns.

        Raises:
            BatchError: there is no batch, or none that counts.
            ModelError: `model` has a different structure; for objects, the model's output does not
                have one row for each example.
            InputError: there are objects, and the trainer has an objective.
        """
        self._session.refuse_here("evaluate")
        self._agreement.compare("evaluate", model)
        return self._evaluator.evaluate(batches, metrics, other=model)

    @hides_own_frames
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

            scores = trainer.predict([X])
            labels = scores.argmax(dim=1)

        Args:
            batches: as for `evaluate`. Of a Loader every example is taken once, in the order of the
                data set, whether it shuffles or not.
            forward: `forward(model, *batch)`, a tensor or a nesting of tensors with a row for each
                example; by default the model's output for the batch's first part. A batch that is
                a mapping is given as `forward(model, **batch)` where `forward` takes its names; by
                default the model gets those that it takes.
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
        self._session.refuse_here("predict")
        self._agreement.compare("predict", model)
        return self._evaluator.predict(batches, forward, dim, other=model)

    @hides_own_frames
    @INTERRUPTS.uninterrupted
    def waitall(self) -> None:
        """Wait for every step; afterwards the model may be read, and changed in any way.

            with evenstep.Trainer(model, optimizer, loss, max_in_flight=2) as trainer:
                for X, y in trainer.epoch(loader):
                    trainer.step(X, y)
                trainer.waitall()
                torch.save(model.state_dict(), "net.pt")

        Raises:
            Exception: the error of a step in flight; it and those after it were not taken.
            ClosedError: a step failed within its update.
        """
        self._session.refuse_fork()
        self._pipeline.finish()
        self._reporter.call_back()
        self._update.refuse_half_step()

    @hides_own_frames
    def fingerprint(self, version: int = 1) -> str:
        """Return the SHA-256 of parameters, buffers and optimizer state (hexadecimal).

            print(trainer.fingerprint()[:12])  # the same on any number of devices

        Waits for the steps in flight.

        Args:
            version: 2 covers also the learning rates and other settings of the optimizer's groups,
                and the extra state of modules. Neither tells which parameters are frozen.
        """
        if version not in (1, 2):
            raise InputError(f"got version={version!r}: there are versions 1 and 2")
        self.waitall()
        if self._partition is not None:
            return self._partition.fingerprint(version)
        compute = fingerprints.fingerprint if version == 1 else fingerprints.fingerprint_2
        return compute(self.model, self.optimizer)

    @hides_own_frames
    def save(self, folder: str | Path, *, keep: int = 3, background: bool = False) -> Path:
        """Save everything that training resumes from, in a new folder `step-…` in `folder`.

            for X, y in trainer.epoch(loader):
                trainer.step(X, y)
            trainer.save("runs/a", keep=2)

        With several processes, each must call this; the first one writes. In one process, a signal
        handler may call it anywhere. A checkpoint holds no gradients: between `backward` and an
        optimizer's step, it is of the state before `backward`.

        Args:
            folder: the folder of this training's checkpoints; created if it doesn't exist. Two
                trainings need two folders.
            keep: the number of checkpoints that are kept, this one and those before it.
            background: return as soon as the state is copied, and write the copy while training
                continues. The copy takes as much memory again. An error is raised by a later
                `step` or `save`, by `wait_for_save`, or when the trainer is closed.

        Raises:
            SaveError: the checkpoint can't be written; earlier ones are unchanged.
            ModelError: the optimizer holds parameters that no longer belong to the model.
            ClosedError: a step failed within its update.
        """
        self._session.refuse_fork()
        return self._saver.save(Path(folder), self.scheduler, keep, background=background)

    def wait_for_save(self) -> None:
        """Wait until the checkpoint that `save(background=True)` has begun is on the disk.

        Of several processes only the first writes; in the others it returns at once.

            trainer.save("runs/a", background=True)
            trainer.step(X, y)
            trainer.wait_for_save()

        Raises:
            SaveError: the checkpoint could not be written; earlier ones are unchanged.
        """
        self._session.refuse_fork()
        self._saver.writer.wait()

    @MakesATrainer
    @functools.partial(hides_own_frames, habits=KEYWORDS)
    @torch.inference_mode(False)
    def load(
        cls,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss | None = None,
        **options: Unpack[TrainerOptions],
    ) -> Trainer:
        """Return a trainer that resumes where a saved one stopped, bit for bit, on any devices.

            with evenstep.Trainer.load("runs/a", model, optimizer, loss, devices=1) as trainer:
                for X, y in trainer.epoch(loader):  # what is left of the epoch
                    trainer.step(X, y)

        Args:
            folder: a folder of checkpoints, of which the newest is loaded, or one checkpoint.
            model: a model built like the saved one; its values are overwritten.
            optimizer: an optimizer built like the saved one; its state is overwritten.
            loss: as for `Trainer`.
            options: as for `Trainer`. The experiment comes from the checkpoint; what you choose of
                it must agree. Devices and all other options may differ.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of a different model, optimizer
                or experiment; model, optimizer and scheduler are unchanged.
        """
        others: Collection[int] = ()
        layout = options.get("layout")
        if isinstance(layout, Layout) and layout.has_owners:
            check_kinds(model, optimizer)
            others = state_of_others(model, optimizer)
        saved = read_training_state(Path(folder), others)
        trainer = cls(model, optimizer, loss, **resumed(options, saved.experiment))
        with unchanged_on_error(saved, model, optimizer, trainer.scheduler):
            trainer._saver.restore(saved, trainer.scheduler, is_part=bool(others))
        note_trained(optimizer, trainer.steps_done, is_loaded=True)
        return trainer

    def ask_to_stop(self) -> None:
        """Ask the training to stop.

            def stop(number, frame):
                trainer.ask_to_stop()

            signal.signal(signal.SIGTERM, stop)

        `should_stop` becomes true in all processes before one step.
        """
        self._session.refuse_fork()
        self._executor.group.ask_to_stop()

    @property
    def should_stop(self) -> bool:
        """Whether the training should stop.

            for X, y in trainer.epoch(loader):
                if trainer.should_stop:
                    trainer.save("runs/a")
                    break
                trainer.step(X, y)

        It becomes true when `ask_to_stop` was called.
        """
        self._session.refuse_fork()
        return self._session.should_stop

    @property
    def contract(self) -> ContractReport | None:
        """The report of the last check of the contract.

            trainer.step(X, y)
            print(trainer.contract.seconds)

        None before the first check.
        """
        return self._self_check.report

    @property
    @INTERRUPTS.uninterrupted
    def trace(self) -> Trace:
        """What ran where and when.

            trainer.step(X, y)
            trainer.trace.save("run.trace")

        Perfetto (https://ui.perfetto.dev) draws the file as a timeline.
        """
        self._session.refuse_fork()
        return self._timekeeper.trace

    @property
    def hybridized(self) -> Hybridized | None:
        """The result of compiling shards.

            compiled = evenstep.Experiment(compile=True)
            with evenstep.Trainer(model, optimizer, loss, experiment=compiled) as trainer:
                trainer.step(X, y)
            print(trainer.hybridized)

        Known after the first step; None without `compile`.
        """
        programs = self._executor.programs
        return programs.result if programs is not None else None

    @property
    def compile_s(self) -> float:
        """The seconds spent on compiling so far.

            print(f"compiling took {trainer.compile_s:.1f} s")

        No step's time includes them.
        """
        return self.hybridized.compile_s if self.hybridized is not None else 0.0

    @INTERRUPTS.uninterrupted
    def shares(self) -> Shares:
        """Return for each device where the time of the training steps went.

            trainer.step(X, y)
            print(trainer.shares())

        The result prints as a table.
        """
        self._session.refuse_fork()
        return self._timekeeper.shares()

    @property
    def exchanged(self) -> Exchanged | None:
        """What devices have sent each other to compute slices.

            evenstep.nn.slice_(model, slices=2)
            layout = evenstep.Layout(divide=evenstep.Slices())
            with evenstep.Trainer(model, optimizer, loss, devices=2, layout=layout) as trainer:
                trainer.step(X, y)
            print(trainer.exchanged)

        None without `Slices()`.
        """
        return self._executor.exchanged

    @property
    def stages(self) -> Mapping[str, int] | None:
        """The stage that each named module begins; None without stages.

            layout = evenstep.Layout(divide=evenstep.Stages("balanced"))
            trainer = evenstep.Trainer(model, optimizer, loss, devices=2, layout=layout)
            print(trainer.stages)

        With stages by time, these are the stages of equal bytes until the first step.
        """
        return self._executor.stage_names

    @property
    def busy_s(self) -> list[float]:
        """For each device, the seconds in which it had work.

            for device, seconds in zip(trainer.devices, trainer.busy_s, strict=True):
                print(device, seconds)

        Only training steps count.
        """
        return [own.compute_s + own.sum_s + own.update_s for own in self.shares()]

    # ---- the parts of a step

    def _open_step(self, leave: int) -> None:
        """Get ready for a step: nothing has failed, states agree, replicas are up to date."""
        if self._saver.writer.pending is not None:
            self._saver.writer.check()
        if [*map(handler_of, SIGNALS)] != INTERRUPTS.known:
            INTERRUPTS.follow()
        if not self._executor.group.is_alone:
            self._agreement.compare_if_due()
        self._open_flight(leave, may_be_written=True)

    def _open_flight(self, leave: int = 0, *, may_be_written: bool = False) -> None:
        """Refuse a call that can't be made now; let its shards see the model as it is."""
        if not self._session.is_open:
            self._session.refuse_closed()
        if self._max_in_flight > 1:
            self._epochs.refuse_inside_loader()
        self._pipeline.make_room(leave, may_be_written=may_be_written)

    def _next_step(self, batch: Batch) -> Step:
        """Return the step that trains on `batch` at the current position."""
        experiment, group = self.experiment, self._executor.group
        for part in batch:
            if not isinstance(part, torch.Tensor) or part.requires_grad:
                refuse_wanted_gradient(batch, self.model)
                break
        if not {*map(type, batch)} <= _TENSORS:
            batch = self._nesting(batch)
        if self._max_in_flight > 1:
            batch = self._nesting(in_own_memory(batch))
        position = self._progress.position
        cut = group.cut(batch, experiment.shards, position.steps_done)
        if torch.accelerator.is_available():
            streams.finish_elsewhere(cut.held(), self._executor.engine.devices)
        return Step.of(
            position,
            cut,
            experiment.seed,
            objective=self._objective if cut.can_join else self._objective_of_unlike,
            finish=self._update,
            observe=self.on_shard,
            digest=NO_DIGEST if group.is_alone else self._agreement.digest_of(batch),
            may_compile=cut.can_join,
        )

    def _refuse_lone_examples(self, step: Step) -> None:
        """Refuse shards of one example, now or in the epoch's last batch, if BatchNorm can't."""
        if not self._lone_examples.are_unjudged(step.attempt.cut):
            return
        self._pipeline.wait()
        self._pipeline.follow_user()
        attempt = step.attempt
        self._lone_examples.refuse_too_few(attempt.cut, attempt.seed, step.objective)

    def _check_contract(self, step: Step) -> None:
        """Check the code on the batch of a step that has not begun."""
        attempt, executor = step.attempt, self._executor
        if self._self_check.waits_for_a_pair(attempt.cut):
            return
        self._pipeline.wait()
        self._pipeline.follow_user()
        for parameter in self._replicas.home.parameters if step.updates else ():
            if is_left(parameter.grad):  # the memory is for the gradients of the check
                parameter.grad = None
        try:
            self._self_check.run(
                step.number, attempt.cut, attempt.seed, step.objective, executor.check_limit_s
            )
        except Exception as error:
            if not executor.goes_on_after(error, f"step {step.number}"):
                raise
        if executor.together is not None:
            executor.together.check_again()
        self._timekeeper.rest()
