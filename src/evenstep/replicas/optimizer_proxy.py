"""A proxy of the user's optimizer, which applies the updates of steps in flight.

While a step is in flight, the user's thread continues: a scheduler sets the next learning rate in
`optimizer.param_groups` before the update that needs the old one, and `zero_grad` drops gradients
that the update needs. So the lanes call `step` on a proxy. The proxy shares the optimizer's state
and the parameters' memory, but has parameter groups and gradients of its own. Each step records the
hyper-parameters that were changed before it was submitted, and its update applies them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class Change(NamedTuple):
    """A hyper-parameter that the user's thread has set in one of the parameter groups."""

    group: int
    key: str
    value: Any


class OptimizerProxy:
    """Applies delayed updates with the hyper-parameters in force when a step was submitted."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copy_optimizer()

    def renew(self) -> None:
        """Copy the optimizer as it is now; no step may be in flight."""
        self.give_back()
        self._copy_optimizer()

    @property
    def fits(self) -> bool:
        """Whether the optimizer still has the state and the parameters that the proxy shares."""
        return (
            self._state is self._optimizer.state
            and _parameter_ids(self._optimizer.param_groups) == self._held
            and all(
                parameter.data_ptr() == original.data_ptr()
                for parameter, original in self._originals.items()
            )
        )

    def record(self) -> list[Change]:
        """Return the hyper-parameters that the user has changed since the last `record`."""
        # Schedulers warn when they are stepped before the optimizer: this one will be.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        groups = zip(self._optimizer.param_groups, self._seen, strict=True)
        changes = [
            Change(number, key, copy.deepcopy(value))
            for number, (group, seen) in enumerate(groups)
            for key, value in group.items()
            if _differs(key, value, seen)
        ]
        for change in changes:
            self._seen[change.group][change.key] = copy.deepcopy(change.value)
        return changes

    def step(
        self, changes: Sequence[Change], gradients: Mapping[nn.Parameter, torch.Tensor | None]
    ) -> None:
        """Update the parameters.

        Args:
            changes: what `record` returned when the step was submitted.
            gradients: the gradients of the user's parameters.
        """
        for change in changes:
            self._proxy.param_groups[change.group][change.key] = change.value
        for parameter, original in self._originals.items():
            # Not `gradients.get`: nobody else may look at a gradient that `zero_grad` just frees.
            parameter.grad = gradients[original] if original in gradients else original.grad  # noqa: SIM401
        try:
            self._proxy.step()
        finally:
            for parameter in self._originals:
                parameter.grad = None

    def give_back(self) -> None:
        """Write what the updates changed in their groups into the user's; no step may be in flight.

        Groups that the user has replaced meanwhile (`load_state_dict`) stay as they are.
        """
        present = {id(group) for group in self._optimizer.param_groups}
        for group, ours, seen in zip(
            self._groups, self._proxy.param_groups, self._seen, strict=True
        ):
            for key, value in ours.items():
                if id(group) in present and _differs(key, value, seen):
                    group[key] = copy.deepcopy(value)
                    seen[key] = copy.deepcopy(value)

    def _copy_optimizer(self) -> None:
        optimizer = self._optimizer
        proxy = object.__new__(type(optimizer))
        proxy.__dict__.update(optimizer.__dict__)
        # A scheduler wraps `step` on the instance, bound to the instance.
        proxy.__dict__.pop("step", None)
        self._groups = list(optimizer.param_groups)
        self._held = _parameter_ids(self._groups)
        self._state = optimizer.state
        self._originals: dict[nn.Parameter, nn.Parameter] = {}
        proxy.param_groups = [
            {**_hyper_parameters(group), "params": [*map(self._proxy_of, group["params"])]}
            for group in self._groups
        ]
        proxy.state = _StateOfProxy(optimizer.state, self._originals)  # type: ignore[assignment]
        self._proxy = proxy
        self._seen = [*map(_hyper_parameters, self._groups)]

    def _proxy_of(self, original: nn.Parameter) -> nn.Parameter:
        """Return another parameter in the same memory, with a gradient of its own."""
        proxy = nn.Parameter(original.detach(), requires_grad=original.requires_grad)
        proxy.__dict__.update(original.__dict__)
        self._originals[proxy] = original
        return proxy


class _StateOfProxy(MutableMapping[Any, Any]):
    """The user's optimizer state, with the proxies of its parameters as keys."""

    def __init__(
        self, state: MutableMapping[Any, Any], originals: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        self._state = state
        self._originals = originals
        self._proxies = {original: proxy for proxy, original in originals.items()}

    def __getitem__(self, key: Any) -> Any:
        return self._state[self._originals.get(key, key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[self._originals.get(key, key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[self._originals.get(key, key)]

    def __contains__(self, key: object) -> bool:
        return self._originals.get(key, key) in self._state  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Any]:
        return (self._proxies.get(key, key) for key in [*self._state])

    def __len__(self) -> int:
        return len(self._state)


def _parameter_ids(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in groups]


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def _differs(key: str, value: Any, seen: Mapping[str, Any]) -> bool:
    return key != "params" and not (key in seen and _equal(value, seen[key]))


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
