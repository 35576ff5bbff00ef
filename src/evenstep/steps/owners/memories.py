"""The update on devices with memory of their own, side by side: each memory owns some parameters.

A parameter's gradient is copied to its owner. There a copy of the optimizer, over that device's
replica, updates it in the lane of the device, and then the new value is written to the user's
module. The first memory's parameters are updated by the user's optimizer itself. Its state has one
entry for each parameter, whoever owns it, so its `state_dict` is always whole.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import nn

from evenstep.devices import carry
from evenstep.engine import Engine
from evenstep.replicas import Replica, Replicas
from evenstep.steps.owners.reducer import deal_parameters

_LOOK_EVERY_S = 1.0


class MemoryOwners:
    """Updates parameters in the memories that own them.

    Args:
        optimizer: the user's optimizer.
        replicas: the replicas of the model; one for each memory besides the first is in `copies`.
        engine: has the lanes of the devices.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, replicas: Replicas, engine: Engine
    ) -> None:
        self._optimizer = optimizer
        self._replicas = replicas
        self._engine = engine

    def step(self, step_home: Callable[[], None]) -> None:
        """Update all parameters that have a gradient in the user's module; called in a lane.

        Args:
            step_home: updates those that still have one, with the user's optimizer.
        """
        replicas = self._replicas
        parameters = replicas.home.parameters
        gradients = [one.grad for one in parameters]
        owners: list[Replica] = [replicas.home, *replicas.copies]
        owner_of = deal_parameters(parameters, len(owners))
        shares = [
            (owner, [i for i, number_of in enumerate(owner_of) if number_of == number])
            for number, owner in enumerate(owners)
        ]
        works = [_Work(self._optimizer, replicas, *share) for share in shares[1:] if share[1]]
        begun = self._begin(works)
        try:
            for work in works:
                for i in work.numbers:
                    parameters[i].grad = None
            step_home()
        finally:
            for lane, done in begun:
                self._wait(lane, done)
            for one, gradient in zip(parameters, gradients, strict=True):
                one.grad = gradient
        for _, done in begun:
            done.result()
        for work in works:
            work.adopt_state()

    def _begin(self, works: Sequence[_Work]) -> list[tuple[int, Future[None]]]:
        """Begin each work in a lane of its own; without threads, do all of them here.

        Any CPU lane may do any work, and the calling lane, which may be any, has the first
        memory's. All others are idle until the step ends.
        """
        lanes, lost = self._engine.lanes, self._engine.lost_lanes
        free = [n for n in range(len(self._engine.devices)) if n not in lost and n != lanes.here]
        assert len(free) >= len(works)
        begun = []
        for lane, work in zip(free, works, strict=False):
            done = Future[None]()
            run = functools.partial(_run, work, done)
            lanes.put(lane, run) if lanes.side_by_side else run(lane)
            begun.append((lane, done))
        return begun

    def _wait(self, lane: int, done: Future[None]) -> None:
        while not wait([done], _LOOK_EVERY_S).done:
            if lane in self._engine.dead_lanes:
                raise self._engine.lost_error(lane)


def _run(work: _Work, done: Future[None], lane: int) -> None:
    try:
        work()
        done.set_result(None)
    except BaseException as error:
        done.set_exception(error)


class _Work:
    """The part of an update that one memory owns.

    The copy of the optimizer is made anew for each step, which costs little: it shares the state.

    Attributes:
        owner: the replica in that memory.
        numbers: the parameters that it owns.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replicas: Replicas,
        owner: Replica,
        numbers: Sequence[int],
    ) -> None:
        self.owner = owner
        self.numbers = numbers
        self._user = optimizer
        self._home = [replicas.home.parameters[i] for i in numbers]
        self._gradients = [one.grad for one in self._home]
        self._own = [owner.parameters[i] for i in numbers]
        pairs: dict[nn.Parameter, nn.Parameter] = dict(zip(self._home, self._own, strict=True))
        self._copy = object.__new__(type(optimizer))
        self._copy.__dict__.update(optimizer.__dict__)
        self._copy.__dict__.pop("step", None)  # a scheduler's, bound to the user's optimizer
        self._copy.param_groups = [
            {
                **{name: copy.deepcopy(one) for name, one in group.items() if name != "params"},
                "params": [pairs[one] for one in group["params"] if one in pairs],
            }
            for group in optimizer.param_groups
        ]
        self._copy.state = collections.defaultdict(dict)
        key: Any
        for key, value in optimizer.state.items():
            if key in pairs:
                self._copy.state[pairs[key]] = value
            elif not isinstance(key, torch.Tensor):
                self._copy.state[key] = copy.deepcopy(value)

    def __call__(self) -> None:
        """Update; called in a lane of the owner's device."""
        for one, gradient in zip(self._own, self._gradients, strict=True):
            one.grad = None if gradient is None else carry(gradient, self.owner.device)
        try:
            self._copy.step()
        finally:
            for one in self._own:
                one.grad = None
        with torch.no_grad():
            torch._foreach_copy_(list[torch.Tensor](self._home), list[torch.Tensor](self._own))

    def adopt_state(self) -> None:
        """Give the user's optimizer the state of parameters that had none."""
        for home, own in zip(self._home, self._own, strict=True):
            if own in self._copy.state and home not in self._user.state:
                self._user.state[home] = self._copy.state[own]
