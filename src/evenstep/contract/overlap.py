"""Computes a shard while another one is in progress: neither may see what the other one keeps.

Devices compute shards at the same time. Each has its own copy of the model, but all share what lies
outside of it: a dict that a hook fills, a global variable, an attribute of a class. A shard that
writes such a value before it reads it depends on no shard before it, but on those beside it.
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
    """Inside `with`, call `other` in the middle of the model's forward pass, and at its end.

    It is called in a thread of its own, as by another device. If it takes long, the shard goes on
    meanwhile, since it may hold a lock that the other one wants; both have ended at the end.
    """
    last_layers = [one for one in model.modules() if next(one.children(), None) is None]
    places = [last_layers[len(last_layers) // 2], model]
    threads: list[threading.Thread] = []

    def passed(module: nn.Module, *_: object) -> None:
        place = next((one for one in places if one is module), None)
        if place is None:
            return
        places.remove(place)
        given = _called, other, within("portable" if is_portable_here() else "torch")
        here = contextvars.copy_context()
        thread = threading.Thread(target=here.run, args=given, daemon=True)
        threads.append(thread)
        thread.start()
        thread.join(_LONGEST_S)

    hook = register_module_forward_hook(passed)
    try:
        yield
    finally:
        hook.remove()
        for thread in threads:
            thread.join()


def _called(
    function: Callable[[], object], arithmetic: Callable[[], AbstractContextManager[object]]
) -> None:
    with arithmetic(), torch.no_grad(), contextlib.suppress(Exception):
        function()  # its errors are met where it is computed by itself
