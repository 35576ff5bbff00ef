"""Checks that an optimizer updates each tensor by itself, so that tensors can have owners.

The optimizer's class says nothing about it, so it is tried out: on copies of some small
parameters, with gradients drawn for the purpose, each tensor is updated for some steps alone and
together with the others. Both must give the same bits, also of the optimizer's state and of the
settings in its groups, and a tensor without a gradient must stay as it is. The gradients are tiny,
then of size 1, then huge: a clip acts above a certain norm only, a limit on a ratio below one.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evenstep.engine.task import aside
from evenstep.errors import ModelError
from evenstep.private_torch.optimizers import has_replaced_step, post_hooks, pre_hooks
from evenstep.private_torch.tensors import version_of
from evenstep.replicas.checks import own_parameters
from evenstep.replicas.optimizer_proxy import inner_optimizers
from evenstep.replicas.replica import same_bits
from evenstep.replicas.settings import is_plain_value

_STEPS = 3  # a rule that measures its own progress couples tensors from its second step on
_SCALES = (1e-6, 1.0, 1e4)  # of the gradients; float16 holds the largest
_TENSORS = 16
_ELEMENTS = 2**16  # in all of them, but for two of each kind, which are tried out in any case
_OWN = {"param_groups", "state", "step"}  # attributes of an optimizer that are not copied as such
_ASK = "leave Owners() out, or use a different optimizer"


def refuse_coupled(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of a tensor may read other tensors.

    The optimizer, its parameters and torch's default generator are left as they are.

    Raises:
        ModelError: the optimizer can't be split by owners; the message says why.
    """
    name = type(optimizer).__name__
    _refuse_by_kind(optimizer, name)
    chosen = _chosen(optimizer)
    if not chosen:
        return
    try:
        with torch.random.fork_rng(devices=[]):
            problem = next(
                filter(None, (_problem_of(optimizer, chosen, scale) for scale in _SCALES)), ""
            )
    except Exception as error:
        raise _error(f"{name} could not be tried out on copies of its parameters: {error!r}") from (
            error
        )
    if problem:
        raise _error(f"{name} {problem}")


def _refuse_by_kind(optimizer: torch.optim.Optimizer, name: str) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _error(f"{name} takes all parameters as one vector")
    if any(group.get("fused") for group in optimizer.param_groups):
        raise _error(
            f"{name} has fused=True, whose bits may depend on how tensors are divided",
            "leave fused out, or use foreach=True",
        )
    for place in inner_optimizers(optimizer, own_state=False):
        raise _error(f"{name}{place} is an optimizer inside another one")
    held = own_parameters(optimizer)
    if held is not None:
        raise _error(
            f"{name}{held} holds parameters outside of the optimizer's param_groups, which has "
            f"those of one owner only",
            "read the parameters from self.param_groups, or leave Owners() out",
        )
    if pre_hooks(optimizer) or post_hooks(optimizer):
        raise _error(
            f"{name} has hooks on its step, which would see the gradients of one owner only",
            "use before_update and after_update, or leave Owners() out",
        )
    if has_replaced_step(optimizer):
        raise _error(f"{name}.step was replaced on the optimizer itself", "override it in a class")


def _error(problem: str, ask: str = _ASK) -> ModelError:
    return ModelError(
        f"Layout(divide=Owners()) can't split this optimizer by owners: {problem}; {ask}"
    )


def _chosen(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return small parameters of each group and number of dimensions, in the optimizer's order.

    An optimizer may treat matrices and vectors differently. So the smallest of each kind come
    first, then the second smallest, and so on.
    """
    given = [group["params"] for group in optimizer.param_groups]
    groups = [[one for one in parameters if _is_trained(one)] for parameters in given]
    sized = sorted(
        ((number, one) for number, group in enumerate(groups) for one in group),
        key=lambda pair: pair[1].numel(),
    )
    of_kind, of_dims = collections.Counter[Any](), collections.Counter[int]()
    ranked: list[tuple[int, int, nn.Parameter]] = []
    for number, one in sized:
        kind = number, one.ndim
        ranked.append((of_kind[kind], of_dims[one.ndim], one))
        of_kind[kind] += 1
        of_dims[one.ndim] += 1
    chosen, left = set[nn.Parameter](), _ELEMENTS
    for rank, _, one in sorted(ranked, key=lambda entry: entry[:2]):
        if len(chosen) < _TENSORS and (rank < 2 or one.numel() <= left):
            chosen.add(one)
            left -= one.numel() if rank >= 2 else 0
    return [one for group in groups for one in group if one in chosen]


def _is_trained(one: nn.Parameter) -> bool:
    return one.requires_grad and one.numel() > 0 and not nn.parameter.is_lazy(one)


def _problem_of(
    optimizer: torch.optim.Optimizer, chosen: Sequence[nn.Parameter], scale: float
) -> str:
    """Return what shows that tensors are coupled; empty if gradients of this scale don't."""
    together = _Trial(optimizer, chosen, scale)
    kept = together.kept()
    together.run(range(len(chosen)))
    unchanged, idle = (_Trial(optimizer, chosen, scale) for _ in range(2))
    idle.run([])
    if not _same(idle.settings(), together.settings()):
        return (
            "changes the settings of a group only where a parameter of it has a gradient, which a "
            "process that owns none of them would miss"
        )
    if not _same(together.kept(), kept):
        return "keeps state in attributes of its own, where it can't be saved for each tensor"
    for number in range(len(chosen)):
        alone = _Trial(optimizer, chosen, scale)
        alone.run([number])
        if not _same(alone.seen(but=number), unchanged.seen(but=number)):
            return "changes parameters that have no gradient, or makes state for them"
        if not _same(alone.of(number), together.of(number)):
            return (
                "updates a tensor with other bits when it is alone than together with others, so "
                "its update reads more than that tensor"
            )
    return ""


class _Trial:
    """A copy of an optimizer over copies of some of its parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, chosen: Sequence[nn.Parameter], scale: float
    ) -> None:
        self._scale = scale
        copies = {one: nn.Parameter(one.detach().clone()) for one in chosen}
        self.parameters = [*copies.values()]
        held = [one for group in optimizer.param_groups for one in group["params"]]
        nothing = nn.Parameter(torch.empty(0))
        memo: dict[int, Any] = {id(one): copies.get(one, nothing) for one in held}
        self.optimizer = object.__new__(type(optimizer))
        for key, value in optimizer.__dict__.items():
            if key not in _OWN:
                hooks = isinstance(value, collections.OrderedDict) and key.startswith("_optimizer")
                self.optimizer.__dict__[key] = (
                    type(value)() if hooks else copy.deepcopy(value, memo)
                )
        self.optimizer.param_groups = [
            {
                **{key: copy.deepcopy(one, memo) for key, one in group.items() if key != "params"},
                "params": [copies[one] for one in group["params"] if one in copies],
            }
            for group in optimizer.param_groups
        ]
        for group in self.optimizer.param_groups:
            if isinstance(group.get("lr"), int | float) and not group["lr"]:
                group["lr"] = 0.01  # a warm-up that begins at 0 would hide every difference
        self.optimizer.state = collections.defaultdict(dict)
        owner: Any
        for owner, kept in optimizer.state.items():
            if owner in copies or not isinstance(owner, torch.Tensor):
                self.optimizer.state[copies.get(owner, owner)] = copy.deepcopy(kept, memo)

    def run(self, numbers: Sequence[int]) -> None:
        """Take some steps in which only these parameters have gradients."""
        random = {number: torch.Generator().manual_seed(number) for number in numbers}
        for _ in range(_STEPS):
            for number, generator in random.items():
                one = self.parameters[number]
                drawn = torch.randn(one.shape, generator=generator, dtype=_drawn_dtype(one))
                one.grad = torch.empty_like(one).copy_(drawn * self._scale)
            with aside():
                self.optimizer.step()

    def kept(self) -> list[Any]:
        """Return what the optimizer's attributes hold, and how often tensors there were written."""
        held = {
            k: v for k, v in vars(self.optimizer).items() if k not in _OWN and not is_plain_value(v)
        }
        leaves = [str(type(one)) for one in held.values()] + _leaves(held)[1:]
        return [
            (id(one), version_of(one)) if isinstance(one, torch.Tensor) else one for one in leaves
        ]

    def of(self, number: int) -> list[Any]:
        """Return a parameter, its state, and the settings of all groups."""
        one = self.parameters[number]
        held = [one.detach(), self.optimizer.state.get(one, {})]
        return _leaves(held) + self.settings()

    def settings(self) -> list[Any]:
        """Return the settings of all groups."""
        return _leaves(
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ]
        )

    def seen(self, *, but: int) -> list[Any]:
        """Return all other parameters and their state."""
        others = [one for number, one in enumerate(self.parameters) if number != but]
        states = [self.optimizer.state.get(one, {}) for one in others]
        return _leaves([[one.detach() for one in others], states])


def _drawn_dtype(one: torch.Tensor) -> torch.dtype:
    return torch.complex64 if one.is_complex() else torch.float32


def _leaves(tree: Any) -> list[Any]:
    """Return what is in nested containers, with the keys of mappings (of a tensor, its `id`)."""
    if isinstance(tree, Mapping):
        keys = [key if is_plain_value(key) else id(key) for key in tree]
        return [type(tree), *keys, *(leaf for one in tree.values() for leaf in _leaves(one))]
    if isinstance(tree, list | tuple | set | frozenset):
        return [type(tree), len(tree), *(leaf for one in tree for leaf in _leaves(one))]
    return [tree]


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(_equal, some, others))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and bool(one == other)
