"""Takes one shard through the stages of a network: hooks on modules change its device in time.

A shard has a thread and a replica of its own. In the forward pass, a hook of the first module of a
stage ends the shard's turn on the stage before, and waits for one on this stage. In the backward
pass, hooks on the graph's nodes change it back: on CPUs, autograd runs the nodes in the shard's
thread, in the reverse order of their creation. Nothing is traced or rewritten, and no node
is added to the graph, so that gradients are added up in the order that they have without stages.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from evenstep.devices import accelerator
from evenstep.devices.forward_mode import refuse_inside_a_level
from evenstep.errors import ContractError
from evenstep.private_torch.graph import is_in_backward, next_number, number_of
from evenstep.replicas import Replica
from evenstep.stages.carried import SHARD_HERE, Carried
from evenstep.stages.plan import StagePlan
from evenstep.stages.turns import Place, Turns
from evenstep.stages.visits import Visits


class StagedShard:
    """One shard of a step, in the thread that computes it.

    Args:
        number: the shard's number.
        turns: the turns of the replica's shards.
        visits: takes down when it was in which stage.
        devices: the accelerator of each stage; empty on CPUs.
        own_memory: whether each stage's device has memory of its own.
        returns: whether it may go back to an earlier stage in a forward pass with gradients.

    Attributes:
        number: the shard's number.
        place: its turn.
        module: the name of the last module of a stage that was called.
    """

    def __init__(
        self,
        number: int,
        turns: Turns,
        visits: Visits,
        *,
        devices: Sequence[torch.device] = (),
        own_memory: bool,
        returns: bool = False,
    ) -> None:
        self.number = number
        self.place = Place(0, backward=False)
        self.module = ""
        self._turns = turns
        self._visits = visits
        self._devices = devices
        self._returns = returns
        self._carried = Carried(devices) if own_memory else None
        self._starts: list[int] = []  # the first node of each stage after the first one, by its
        self._stages = [0]  # sequence number, and the stages
        self._has_graph = False  # of several stages
        self._last: Any = None  # the node of the last module's output

    @property
    def working_s(self) -> float:
        """The seconds since its turn began; 0 while it waits for one."""
        return self._visits.working_s

    @property
    def unfinished(self) -> Place:
        """Where it is computed: on an accelerator, behind the place where its code is."""
        return self._visits.unfinished(self.place)

    @property
    def whereabouts(self) -> str:
        """The stage, and the module, that it is in."""
        module = f", in the module {self.module!r} or after it" if self.module else ""
        return f"in stage {self.place.stage}{module}"

    def begin(self) -> None:
        """Wait for the first turn."""
        self._turns.move(self.number, None, self.place, holds=True)
        SHARD_HERE.carried = self._carried
        self._arrive()

    def end(self) -> None:
        """End the last turn."""
        if self._carried is not None:
            self._carried.put_back()
        self._last = self._carried = SHARD_HERE.carried = None
        self._visits.end(self.place)
        self._visits.close()
        self._turns.end(self.number)

    # ---- called by hooks

    def enter(self, stage: int, name: str, given: Any) -> Any:
        """Go to the stage of a module that is called; return its arguments, in that memory.

        Raises:
            ContractError: the module's stage is before the present one, in a pass with gradients.
            StoppedError: the step was stopped.
        """
        self.module = name
        if stage == self.place.stage:
            return (
                given if self._carried is None else self._carried.late(given, stage, self._starts)
            )
        if is_in_backward():  # recomputed, for torch.utils.checkpoint
            self._move(Place(stage, backward=True), holds=True)
        else:
            records = torch.is_grad_enabled()
            if stage < self.place.stage and self._has_graph and records and not self._returns:
                raise _back_and_forth(name, stage, self.place.stage)
            self._has_graph |= records
            self._return_through(given)
            self._move(Place(stage, backward=False), holds=self._has_graph)
            self._starts.append(next_number())
            self._stages.append(stage)
        return given if self._carried is None else self._carried.all(given, stage)

    def left(self, output: Any) -> None:
        """Note what a module has returned."""
        if self._carried is not None:
            self._carried.write_back()
        self._last = output.grad_fn if isinstance(output, torch.Tensor) else None

    def returned(self, output: Any) -> Any:
        """Return what the model has returned, where its batch lies: on the first accelerator."""
        if self._carried is None or not self._devices:
            return output
        accelerator.allocate_on(self._devices[0])
        return self._carried.home(output)

    def refuse_uses_beside_copies(self, total: torch.Tensor) -> None:
        """Refuse a loss that uses a tensor itself between uses of its copy."""
        if self._carried is not None:
            self._carried.refuse_uses_beside_copies(total)

    def forward_ends(self, total: torch.Tensor) -> None:
        """Make the backward pass of a loss begin in the stage in which the forward pass ended."""
        self._last = None
        node: Any = total.grad_fn
        if node is not None:
            node.register_prehook(functools.partial(self._go_back, self.place.stage))

    # ----

    def stage_of(self, node: Any) -> int:
        """Return the stage that a node of the graph was made in."""
        return self._stages[bisect.bisect_right(self._starts, number_of(node))]

    def _return_through(self, given: Any) -> None:
        """Make the backward pass return to the stages that these tensors come from."""
        leaves: list[Any] = optree.tree_leaves(given)
        nodes: set[Any] = {leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor)}
        nodes |= {self._last}
        self._last = None
        for node in nodes - {None}:
            node.register_prehook(functools.partial(self._go_back, self.stage_of(node)))

    def _go_back(self, stage: int, gradients: object) -> None:
        """Go to the stage of a node whose backward pass begins: a hook of the node."""
        if self.place != (stage, True):
            self._move(Place(stage, backward=True), holds=stage >= self.place.stage)

    def _move(self, after: Place, *, holds: bool) -> None:
        """Go to another stage, or to the backward pass on the same one."""
        refuse_inside_a_level("modules of several stages")
        self._visits.end(self.place)
        before, self.place = self.place, after
        if before.stage != after.stage:
            self._turns.move(self.number, before, after, holds=holds)
        self._arrive()

    def _arrive(self) -> None:
        if self._devices and not is_in_backward():  # there, autograd sets the device
            accelerator.allocate_on(self._devices[self.place.stage])
        self._visits.begin(self.place)


def hook_stages(
    replica: Replica,
    stages: StagePlan,
    shard_now: Callable[[], StagedShard | None],
    make_other: Callable[[], StagedShard] | None = None,
) -> list[RemovableHandle]:
    """Hook the modules of a replica, so that its shard changes the stage where they are called.

    Args:
        replica: a copy of the user's module, which nothing else calls.
        stages: the stages.
        shard_now: returns the shard that is computed on this replica; None outside of steps.
        make_other: where a replica lies on several accelerators, makes what stands for a shard in
            calls outside of steps (the contract's checks).

    Returns:
        What removes the hooks.
    """
    others: list[StagedShard] = []  # at most one

    def shard_here(name: str) -> StagedShard | None:
        shard = shard_now()
        if shard is None and make_other is not None:
            if not name or not others:
                others[:] = [make_other()]
            shard = others[0]
        return shard

    def before(stage: int, name: str, _: nn.Module, args: Any, options: Any) -> Any:
        shard = shard_here(name)
        return None if shard is None else shard.enter(stage, name, (args, options))

    def after(name: str, _: nn.Module, args: Any, output: Any) -> Any:
        shard = shard_now() or next(iter(others), None)
        if shard is None:
            return None
        shard.left(output)
        if name:
            return None
        output = shard.returned(output)
        if others:
            others.pop().end()
        return output

    hooks = []
    for name, module in replica.module.named_modules():
        is_divided_model = make_other is not None and not name
        if is_divided_model or name in stages.first or stages.has_whole(name, module):
            enter = functools.partial(before, stages.of_module.get(name, 0), name)
            hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(functools.partial(after, name)))
    return hooks


def _back_and_forth(name: str, stage: int, now: int) -> ContractError:
    return ContractError(
        f"the module {name!r} of stage {stage} was called after modules of stage {now}: a shard "
        f"goes through the stages once, in their order, so put {name!r} into stage {now} (its name "
        f"in Stages(...)), and call the model once in the objective"
    )
