"""What a trainer's `with` starts and stops: worker threads, other processes, settings of torch."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

import torch

from evenstep.batch.rng import callers_generators
from evenstep.devices import deterministic_kernels, kept_memory
from evenstep.devices.forward_mode import one_level_at_a_time
from evenstep.distributed import job_share, local_share
from evenstep.engine.interrupts import INTERRUPTS, interruptible
from evenstep.engine.ownership import Ownership
from evenstep.errors import ClosedError, InputError
from evenstep.replicas import align_state, inner_optimizers, note_left
from evenstep.shard.together import watched_reads
from evenstep.steps.groups.group import Group
from evenstep.steps.groups.joining import OPEN, joined
from evenstep.steps.owners.reducer import OwnerReducer
from evenstep.steps.reducer import ProcessReducer
from evenstep.steps.update import is_in_a_trainer
from evenstep.training.agreement import Agreement
from evenstep.training.habits import explain_backward
from evenstep.training.notes import (
    Notes,
    note_trained,
    say_too_little_memory,
    say_who_trained,
)
from evenstep.training.setup.arguments import Chosen
from evenstep.training.setup.combinations import refuse_combinations, refuse_without_threads
from evenstep.training.setup.parts import Parts

logger = logging.getLogger("evenstep")

_OPEN = weakref.WeakSet["Session"]()


class Session:
    """Opens and closes a trainer, as often as the user likes.

    Args:
        optimizer: the user's optimizer.
        parts: the parts of the trainer's steps.
        chosen: experiment, devices, layout and faults.
        agreement: compares what the processes train.
        notes: logged when the trainer is opened.
        others: opened after everything else, and closed before it.

    Attributes:
        is_open: whether the trainer is open.
        owner: the process that has opened it last; None before the first time.
        turn: held by the thread that computes a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Parts,
        chosen: Chosen,
        agreement: Agreement,
        notes: Notes,
        others: tuple[contextlib.AbstractContextManager[object], ...],
    ) -> None:
        self.is_open = False
        self.owner: Ownership | None = None
        self._optimizer = optimizer
        self._parts = parts
        self._chosen = chosen
        self._agreement = agreement
        self._notes = notes
        self._others = others
        self._opened = contextlib.ExitStack()
        self.turn = threading.RLock()

    def refuse_fork(self) -> None:
        """Refuse a call in a fork of the process that opened the trainer."""
        if self.owner is not None:
            self.owner.refuse_elsewhere()

    def refuse_here(self, call: str) -> None:
        """Refuse a call in a fork, and by a signal handler in the middle of another call.

        In others, handlers that the user has installed meanwhile are replaced first.
        """
        self.refuse_fork()
        INTERRUPTS.follow()
        if INTERRUPTS.is_handling:
            INTERRUPTS.refuse_in_handler(call)

    def refuse_closed(self) -> None:
        """Refuse a call of a trainer that is not open."""
        if self.is_open:
            return
        if self.owner is not None:
            raise ClosedError(
                "the trainer was closed, at the end of its `with` or by `close`: indent the call "
                "into the `with`, or open the trainer again by `with trainer:`"
            )
        raise ClosedError(
            "the trainer is not open: use it as `with evenstep.Trainer(...) as trainer:`, or "
            "as `trainer = evenstep.Trainer(...).open()`"
        )

    def refuse_two_threads(self) -> NoReturn:
        """Refuse a step that begins while another thread computes one."""
        self._parts.pipeline.refuse_here()
        raise InputError(
            f"the thread {threading.current_thread().name} began a step while another thread "
            f"computes one of the same trainer: let one thread take all steps (the trainer uses "
            f"all devices by itself), or give each thread a model and a trainer of its own"
        )

    @contextlib.contextmanager
    def one_thread(self) -> Iterator[None]:
        """Refuse a step of another thread inside `with`."""
        if not self.turn.acquire(blocking=False):
            self.refuse_two_threads()
        try:
            yield
        finally:
            self._parts.replicas.computed.show()
            self.turn.release()

    # ---- opening; the caller is shielded from signals

    def open(self) -> None:
        """Start the worker threads, and find the other processes."""
        self.refuse_here("open")
        if self.is_open:
            raise ClosedError("the trainer is open already: remove the second `with` or `open`")
        self._refuse_shared_optimizer()
        self._refuse_shared_parameters()
        if self._parts.partition is not None:
            self._parts.partition.refuse_again()
        for note in self._notes.lines:
            logger.warning(note)
        say_who_trained(self._optimizer, self._parts.progress.position.steps_done)
        self._agreement.begin()
        opened = self._opened = contextlib.ExitStack()
        try:
            self._start(opened)
            self.owner = Ownership("trainer", self._close_at_exit)
            _OPEN.add(self)
            self.is_open = True
        except BaseException as error:
            try:
                self._end(type(error), error, error.__traceback__)
            except BaseException:  # maybe thrown into this thread, and has cut that off
                self._end(type(error), error, error.__traceback__)
                raise
            raise

    def _start(self, opened: contextlib.ExitStack) -> None:
        """Start everything, to be ended by `opened`."""
        parts = self._parts
        opened.enter_context(INTERRUPTS.handled())
        group = self._join(opened)
        steps_done = parts.progress.position.steps_done
        opened.enter_context(parts.reporter.opened(steps_done, is_first=group.is_first))
        opened.enter_context(kept_memory(self._chosen.layout.tune_malloc))
        opened.enter_context(deterministic_kernels(parts.engine.devices))
        opened.enter_context(callers_generators())
        opened.enter_context(one_level_at_a_time())
        if self._chosen.experiment.arithmetic == "portable":
            opened.enter_context(watched_reads())
        opened.enter_context(parts.engine)
        refuse_combinations(self._chosen, is_alone=group.is_alone)
        refuse_without_threads(self._chosen, have_threads=parts.engine.side_by_side)
        for other in self._others:
            opened.enter_context(other)
        opened.enter_context(parts.update.watching())
        self._align_state(opened)
        rank, of_machine = local_share()
        if rank == 0:
            home, processes = parts.replicas.home, job_share()[1]
            given = home.parameters, self._optimizer, self._chosen
            say_too_little_memory(*given, processes=processes, of_machine=of_machine)
        note_left(parts.replicas.home.parameters)
        INTERRUPTS.check()

    def _align_state(self, opened: contextlib.ExitStack) -> None:
        """Move the optimizer's state where its products have the same bits each time.

        Until `opened` is closed, also a state that the user loads.
        """
        model = self._parts.replicas.home.module
        aligned = functools.partial(align_state, model=model)
        for one in (self._optimizer, *inner_optimizers(self._optimizer).values()):
            aligned(one)
            opened.callback(one.register_load_state_dict_post_hook(aligned).remove)

    def _refuse_shared_optimizer(self) -> None:
        """Refuse an optimizer that another open trainer steps."""
        if is_in_a_trainer(self._optimizer):
            raise InputError(
                "another trainer with this optimizer is open: close that one first (end its "
                "`with`, or call its `close`), or give each trainer an optimizer of its own"
            )

    def _refuse_shared_parameters(self) -> None:
        """Refuse parameters that another open trainer trains, if either has steps in flight.

        One at a time, each trainer sees what the other has done. Steps in flight don't.
        """
        own = {id(one) for one in self._parts.replicas.home.parameters if one.requires_grad}
        for other in _OPEN:
            if not (self._chosen.overlaps or other._chosen.overlaps):
                continue
            for name, one in other._parts.replicas.home.module.named_parameters():
                if id(one) in own:
                    raise InputError(
                        f"another open trainer trains {name} too, and with max_in_flight above 1 "
                        f"a step of one would begin before the other's update: close that one "
                        f"first, or give both max_in_flight=1"
                    )

    def _join(self, opened: contextlib.ExitStack) -> Group:
        """Join the other processes, until `opened` is closed, and make sure that all agree."""
        parts, chosen = self._parts, self._chosen
        executor = parts.executor
        group = interruptible(
            opened.enter_context,
            joined(
                parts.replicas,
                executor.experiment,
                chosen.faults.peer_timeout_s,
                self._agreement.facts,
                executor.shards_per_s,
                chosen.max_in_flight,
                executor.engine.refuse_failed,
                allow_rounding=chosen.faults.allow_rounding,
                make_reducer=ProcessReducer if parts.partition is None else OwnerReducer,
            ),
        )
        if parts.partition is not None:
            opened.enter_context(parts.partition.split(group))
        if self.should_stop:
            group.ask_to_stop()
        executor.join(group)
        if group.differences:
            reason = f"the processes round differently: {group.differences}"
            logger.warning(self._notes.note_rounding(reason))
            self._agreement.compare(OPEN)
        return group

    @property
    def should_stop(self) -> bool:
        """Whether the training should stop."""
        steps_done = self._parts.progress.position.steps_done
        return self._parts.executor.group.should_stop(steps_done)

    # ---- closing

    def close(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Finish the steps in flight (after an error, drop them), and stop the threads.

        Closed already, it does nothing. The caller is shielded from signals.
        """
        if not self.is_open or (self.owner and self.owner.is_elsewhere):  # a fork has no threads
            return
        parts = self._parts
        try:
            if error is None:
                self.refuse_fork()
                parts.pipeline.finish()
                self._agreement.compare_at_end()
                parts.reporter.call_back()
            else:
                explain_backward(error)
                parts.pipeline.abandon(error)
                parts.executor.reducer.leave(error)
                parts.update.give_back()
        finally:
            try:
                self._end(kind, error, traceback)
            except BaseException:  # maybe thrown into this thread, and has cut that off
                self._end(kind, error, traceback)
                raise

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_open = False
        _OPEN.discard(self)
        note_trained(self._optimizer, self._parts.progress.position.steps_done)
        atexit.unregister(self.close_with_program)
        if self.owner is not None:
            self.owner.end()
        executor = self._parts.executor
        executor.join(executor.group.without_others())
        self._opened.__exit__(kind, error, traceback)
        self._parts.engine.close()  # if an exception from outside has interrupted that
        self._parts.update.unwatch()

    @INTERRUPTS.uninterrupted
    def close_with_program(self) -> None:
        """Close what `Trainer.open` has opened; after an error that ends it, as `with` does."""
        error = getattr(sys, "last_value", None)
        self.close(None if error is None else type(error), error)

    @INTERRUPTS.uninterrupted
    def _close_at_exit(self) -> None:
        self.close(ClosedError, ClosedError("the program ended"))
