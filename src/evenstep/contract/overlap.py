"""Computes a shard while another one is in progress: neither may see what the other one keeps.

Devices compute shards at the same time. Each has its own copy of the model, but all share what lies
outside of it: a dict that a hook fills, a global variable, an attribute of a class. A shard that
writes such a value before it reads it depends on no shard before it, but on those beside it. It is
found if a layer of the model lies between the two, or the model's end.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import optree
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from evenstep.arithmetic import is_portable_here, within
from evenstep.contract.repeat import ShardResult, compute_observed, first_difference
from evenstep.errors import ContractError
from evenstep.replicas import Replica
from evenstep.replicas.replica import same_bits
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.loss import ShardObjective

_LONGEST_S = 20.0  # for which a shard waits for another one that begins inside it


def refuse_shared_values(
    replica: Replica,
    work: ShardWork,
    objective: ShardObjective,
    expected: ShardResult,
    other: Callable[[], object],
) -> None:
    """Refuse a shard that gives something else if another one begins in the middle of it.

    Args:
        replica: a copy of the model.
        work: the shard.
        objective: computes its loss.
        expected: what it has given there by itself.
        other: computes the loss of another shard, on another copy.

    Raises:
        ContractError: it does.
    """
    around = _interrupted(replica.module, other)
    found = compute_observed(replica, work, objective, around)
    differing = first_difference(replica, expected, found)
    if differing:
        raise _error(f": {differing}")


def refuse_shared_outputs(
    model: nn.Module, compute: Callable[[], Any], other: Callable[[], object]
) -> None:
    """Refuse an evaluation of a shard that gives something else if another one begins meanwhile.

    Args:
        model: the copy of the model that the shard is computed with.
        compute: computes the shard, and returns a tree of tensors and numbers.
        other: computes another shard, with another copy.

    Raises:
        ContractError: it does.
    """
    expected = compute()
    with _interrupted(model, other):
        found = compute()
    pairs = zip(optree.tree_leaves(expected), optree.tree_leaves(found), strict=True)
    for ours, theirs in pairs:
        if not same_bits(torch.as_tensor(ours), torch.as_tensor(theirs)):
            raise _error("")


def _error(differing: str) -> ContractError:
    return ContractError(
        f"a shard gives two results, by itself and while another one is computed{differing}. "
        f"Its code keeps a value outside of the model and reads it later (a hook that fills a "
        f"dict, a global variable, an attribute of a class), and devices overwrite each "
        f"other's values. Keep it in an attribute of the module, which each device has for "
        f"itself: a hook gets the module as its first argument"
    )


@contextlib.contextmanager
def _interrupted(model: nn.Module, other: Callable[[], object]) -> Iterator[None]:
    """Inside `with`, run `other` one layer behind the model's forward pass, and end it at its end.

    It is called in a thread of its own, as by another device. So what the model's code sets before
    the end of any layer, and reads behind it, is what `other` has set meanwhile.
    """
    behind = _Behind(model, other)
    hook = register_module_forward_hook(behind.passed)
    try:
        yield
    finally:
        hook.remove()
        behind.end()


class _Behind:
    """Runs a function beside a model's forward pass, by turns: a layer here, a layer there.

    If a turn takes long, both go on at the same time, since one may hold a lock that the other
    wants.
    """

    def __init__(self, model: nn.Module, other: Callable[[], object]) -> None:
        self._model, self._other = model, other
        self._layers = {id(one) for one in model.modules() if _has_no_parts(one)}
        self._has_turn, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        self._takes_turns = True
        self._thread: threading.Thread | None = None

    def passed(self, module: nn.Module, *_: object) -> None:
        """Hear of a module's forward pass that has ended, in any thread."""
        if not self._takes_turns:
            return
        if threading.current_thread() is self._thread:
            if _has_no_parts(module):
                self._is_done.release()
                self._wait_for(self._has_turn)
        elif module is self._model:
            thread = self._begun()
            self._go_on()
            thread.join(_LONGEST_S)
        elif id(module) in self._layers:
            self._begun()
            self._has_turn.release()
            self._wait_for(self._is_done)

    def end(self) -> None:
        """Wait until the function has ended, if it has begun."""
        if self._thread is not None:
            self._go_on()
            self._thread.join()

    def _begun(self) -> threading.Thread:
        """Return the thread, which computes as the calling one does."""
        if self._thread is None:
            given = self._run, within("portable" if is_portable_here() else "torch")
            here = contextvars.copy_context()
            self._thread = threading.Thread(target=here.run, args=given, daemon=True)
            self._thread.start()
        return self._thread

    def _wait_for(self, turn: threading.Semaphore) -> None:
        if not turn.acquire(timeout=_LONGEST_S):
            self._go_on()

    def _go_on(self) -> None:
        """Take no more turns."""
        self._takes_turns = False
        self._has_turn.release()

    def _run(self, arithmetic: Callable[[], AbstractContextManager[object]]) -> None:
        self._has_turn.acquire()
        try:
            with arithmetic(), torch.no_grad(), contextlib.suppress(Exception):
                self._other()  # its errors are met where it is computed by itself
        finally:
            self._is_done.release()


def _has_no_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is None
