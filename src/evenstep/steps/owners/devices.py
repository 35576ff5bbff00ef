"""The update on the CPU devices of one process, side by side: each updates some of the parameters.

The parameters are dealt to the lanes of the devices by size. The calling lane updates its own with
the user's optimizer. Each other lane has a copy of the optimizer, over parameters that share the
memory of the user's: nothing is moved. The state has one entry for each parameter, in the user's
optimizer, whichever lane has updated it, so its `state_dict` is always whole.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
from torch import nn

from evenstep.collectives import deal
from evenstep.engine import Engine
from evenstep.engine.lanes import Work
from evenstep.replicas import Replicas, parameter_proxy
from evenstep.shard.partial_sum import divide_gradients

_LOOK_EVERY_S = 1.0


class DeviceOwners:
    """Divides gradients, updates parameters and copies them, in all lanes at the same time.

    Args:
        optimizer: the user's optimizer.
        replicas: the replicas of the model.
        engine: has the lanes of the devices, all of them CPUs.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, replicas: Replicas, engine: Engine
    ) -> None:
        self._optimizer = optimizer
        self._replicas = replicas
        self._engine = engine

    def divide(self, gradients: Sequence[torch.Tensor | None], count: float) -> None:
        """Divide every gradient by `count`, in place; called in a lane."""
        present = [one for one in gradients if one is not None]

        def divide_share(own: Sequence[torch.Tensor]) -> None:
            divide_gradients(own, count)

        lanes = self._free_lanes()
        shares = _dealt(present, lanes)
        self._at_once(lanes, [functools.partial(divide_share, own) for own in shares])

    def step(self, step_first: Callable[[], None]) -> None:
        """Update all parameters that have a gradient in the user's module; called in a lane.

        Args:
            step_first: updates those that still have one, with the user's optimizer.
        """
        trained = [one for one in self._replicas.home.parameters if one.grad is not None]
        gradients = [one.grad for one in trained]
        lanes = self._free_lanes()
        _, *others = _dealt(trained, lanes)
        works = [_Work(self._optimizer, own) for own in others if own]
        try:
            for one in itertools.chain.from_iterable(others):
                one.grad = None
            self._at_once(lanes, [step_first, *works])
        finally:
            for one, gradient in zip(trained, gradients, strict=True):
                one.grad = gradient
        for work in works:
            work.adopt_state()

    def update_copies(self) -> None:
        """Copy the updated parameters to every memory that holds copies of them; in a lane."""
        home, copies = self._replicas.home, self._replicas.copies
        pairs: dict[nn.Parameter, list[nn.Parameter]] = {one: [] for one in home.parameters}
        for replica in copies:
            for one, copied in zip(home.parameters, replica.parameters, strict=True):
                pairs[one].append(copied)

        def copy_share(own: Sequence[nn.Parameter]) -> None:
            with torch.no_grad():
                for one in own:
                    for copied in pairs[one]:
                        copied.copy_(one)

        lanes = self._free_lanes()
        shares = _dealt(home.parameters, lanes)
        self._at_once(lanes, [functools.partial(copy_share, own) for own in shares])
        self._replicas.mark_synchronised()

    def _free_lanes(self) -> list[int]:
        """Return the other lanes that compute as the calling one does: idle until the step ends."""
        lanes, lost, devices = self._engine.lanes, self._engine.lost_lanes, self._engine.devices
        threads = devices[lanes.here].threads
        return [
            lane
            for lane, device in enumerate(devices)
            if lane not in lost and lane != lanes.here and device.threads == threads
        ]

    def _at_once(self, free: Sequence[int], calls: Sequence[Callable[[], None]]) -> None:
        """Make the first call here, and each other one in a lane; wait for all, also after errors.

        Raises:
            Exception: the error of the first call that has failed.
            DeviceLostError: the thread of a lane has ended.
        """
        lanes, here = self._engine.lanes, Future[None]()
        begun = []
        for lane, call in zip(free, calls[1:], strict=False):
            done = Future[None]()
            inside = contextvars.copy_context().run
            run: Work = functools.partial(inside, _run, call, done)  # type: ignore[call-arg]
            lanes.put(lane, run) if lanes.side_by_side else run(lane)
            begun.append((lane, done))
        _run(calls[0], here, lanes.here)
        for lane, done in begun:
            while not wait([done], _LOOK_EVERY_S).done and lane not in self._engine.dead_lanes:
                pass
        here.result()
        for lane, done in begun:
            if not done.done():
                raise self._engine.lost_error(lane)
            done.result()


def _run(call: Callable[[], None], done: Future[None], lane: int) -> None:
    try:
        call()
        done.set_result(None)
    except BaseException as error:
        done.set_exception(error)


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def _dealt(tensors: Sequence[_Tensor], free: Sequence[int]) -> list[list[_Tensor]]:
    """Return the tensors of the calling lane, then those of each free one, dealt by size."""
    shares: list[list[_Tensor]] = [[] for _ in (None, *free)]
    owner_of = deal([one.nbytes for one in tensors], len(shares))
    for one, owner in zip(tensors, owner_of, strict=True):
        shares[owner].append(one)
    return shares


class _Work:
    """The part of an update that another lane makes.

    The copy of the optimizer is made anew for each step, which costs little: it shares the state.

    Args:
        optimizer: the user's optimizer.
        own: the parameters that the lane updates; their gradients are taken now.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, own: Sequence[nn.Parameter]) -> None:
        self._user = optimizer
        self._pairs: dict[nn.Parameter, nn.Parameter] = {one: parameter_proxy(one) for one in own}
        for one, proxy in self._pairs.items():
            proxy.grad = one.grad
        self._copy = object.__new__(type(optimizer))
        self._copy.__dict__.update(optimizer.__dict__)
        self._copy.__dict__.pop("step", None)  # a scheduler's, bound to the user's optimizer
        self._copy.param_groups = [
            {
                **{name: copy.deepcopy(one) for name, one in group.items() if name != "params"},
                "params": [self._pairs[one] for one in group["params"] if one in self._pairs],
            }
            for group in optimizer.param_groups
        ]
        self._copy.state = collections.defaultdict(dict)
        key: Any
        for key, value in optimizer.state.items():
            if key in self._pairs:
                self._copy.state[self._pairs[key]] = value
            elif not isinstance(key, torch.Tensor):
                self._copy.state[key] = copy.deepcopy(value)

    def __call__(self) -> None:
        """Update; called in the lane."""
        self._copy.step()

    def adopt_state(self) -> None:
        """Give the user's optimizer the state of parameters that had none."""
        for one, proxy in self._pairs.items():
            if proxy in self._copy.state and one not in self._user.state:
                self._user.state[one] = self._copy.state[proxy]
