"""A proxy of the user's optimizer, which applies the updates of steps in flight.

While a step is in flight, the user's thread continues: a scheduler sets the next learning rate in
`optimizer.param_groups` before the update that needs the old one, and `zero_grad` drops gradients
that the update needs. So the lanes call `step` on a proxy. The proxy shares the optimizer's state
and the parameters' memory, but has parameter groups and gradients of its own. Each step records the
hyper-parameters that were changed before it was submitted, and its update applies them. Attributes
of the optimizer with plain values, or dicts of such (those of a custom optimizer), are treated as
hyper-parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from evenstep.errors import ContractError, InputError, ModelError
from evenstep.private_torch.optimizers import has_replaced_step
from evenstep.private_torch.tensors import version_of
from evenstep.replicas.checks import own_parameters
from evenstep.replicas.replicas import forms_of

_ATTRIBUTES = -1  # the "group" of the optimizer's own attributes
_SHARED = {"param_groups", "state", "step", "_opt_called"}  # attributes that are handled otherwise
_PLAIN = (bool, int, float, complex, str, type(None))


class Change(NamedTuple):
    """A hyper-parameter that the user's thread has set in a parameter group, or an attribute."""

    group: int
    key: str
    value: Any


class OptimizerProxy:
    """Applies delayed updates with the hyper-parameters in force when a step was submitted."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copy_optimizer()

    def mark(self) -> None:
        """Note that the optimizer's state is as the proxy has left it."""
        self._marks = _marks(self._state)

    def refuse_written(self) -> None:
        """Refuse a state that was written to since `mark`.

        Raises:
            InputError: the user wrote to it while a step was in flight.
        """
        now = _marks(self._state)
        same = len(now) == len(self._marks) and all(
            one is other and count == known
            for (one, count), (other, known) in zip(now, self._marks)  # noqa: B905
        )
        if not same:
            raise InputError(
                "the optimizer's state was written to while a step was in flight: call "
                "trainer.waitall() before you change it, or use max_in_flight=1"
            )

    def renew(self) -> None:
        """Copy the optimizer as it is now; no step may be in flight.

        Changes that were recorded for steps that were not taken are the user's, and stay.
        """
        self._apply([*self._recorded])
        self.give_back()
        self._copy_optimizer()

    @property
    def fits(self) -> bool:
        """Whether the optimizer still has the state, parameters and objects that are shared."""
        return (
            self._state is self._optimizer.state
            and self._step is self._optimizer.__dict__.get("step")
            and self._references == _references(self._optimizer)
            and _parameter_ids(self._optimizer.param_groups) == self._held
            and forms_of(self._originals) == forms_of(self._originals.values())
            and all(
                parameter.data_ptr() == original.data_ptr()
                for parameter, original in self._originals.items()
            )
        )

    def record(self) -> list[Change]:
        """Return the hyper-parameters that the user has changed since the last `record`."""
        # Schedulers warn when they are stepped before the optimizer: this one will be.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        groups = [_attributes(self._optimizer), *self._optimizer.param_groups, *self._dicts]
        pairs = zip(groups, self._seen, strict=True)
        changes = [
            Change(number, key, copy.deepcopy(value))
            for number, (group, seen) in enumerate(pairs, _ATTRIBUTES)
            for key, value in group.items()
            if _differs(key, value, seen)
        ]
        for change in changes:
            self._seen[change.group + 1][change.key] = copy.deepcopy(change.value)
        self._recorded += changes
        return changes

    def step(
        self, changes: Sequence[Change], gradients: Mapping[nn.Parameter, torch.Tensor | None]
    ) -> None:
        """Update the parameters.

        Args:
            changes: what `record` returned when the step was submitted.
            gradients: the gradients of the user's parameters.
        """
        self._apply(changes)
        for parameter, original in self._originals.items():
            # Not `gradients.get`: nobody else may look at a gradient that `zero_grad` just frees.
            parameter.grad = gradients[original] if original in gradients else original.grad  # noqa: SIM401
        try:
            self._proxy.step()
        finally:
            for parameter in self._originals:
                parameter.grad = None

    def _apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._owned[change.group + 1][change.key] = change.value
        del self._recorded[: len(changes)]

    def give_back(self) -> None:
        """Write what the updates changed in their groups into the user's; no step may be in flight.

        Groups that the user has replaced meanwhile (`load_state_dict`) stay as they are.
        """
        present = {id(group) for group in (*self._optimizer.param_groups, *self._dicts)}
        ours = [_attributes(self._proxy), *self._owned[1:]]
        for group, own, seen in zip(self._groups, ours, self._seen, strict=True):
            is_present = group is self._optimizer.__dict__ or id(group) in present
            for key, value in own.items():
                if is_present and _differs(key, value, seen):
                    group[key] = copy.deepcopy(value)
                    seen[key] = copy.deepcopy(value)
        for key, value in self._proxy.__dict__.items():
            is_own = any(value is one for one in self._owned)
            if key in self._references and id(value) != self._references[key] and not is_own:
                self._optimizer.__dict__[key] = value
                self._references[key] = id(value)

    def _copy_optimizer(self) -> None:
        optimizer = self._optimizer
        self._step = optimizer.__dict__.get("step")
        _refuse_replaced_step(optimizer)
        _refuse_nested(optimizer)
        _refuse_own_parameters(optimizer)
        proxy = object.__new__(type(optimizer))
        proxy.__dict__.update(optimizer.__dict__)
        # A scheduler wraps `step` on the instance, bound to the instance.
        proxy.__dict__.pop("step", None)
        groups = list(optimizer.param_groups)
        dicts = _dicts_of(optimizer)
        self._dicts = [*dicts.values()]
        self._groups = [optimizer.__dict__, *groups, *self._dicts]
        self._held = _parameter_ids(groups)
        self._state = optimizer.state
        self._references = _references(optimizer)
        self._originals: dict[nn.Parameter, nn.Parameter] = {}
        proxy.param_groups = [
            {**_hyper_parameters(group), "params": [*map(self._proxy_of, group["params"])]}
            for group in groups
        ]
        proxy.state = _StateOfProxy(optimizer.state, self._originals)  # type: ignore[assignment]
        self._proxy = proxy
        own = {key: copy.deepcopy(one) for key, one in dicts.items()}
        proxy.__dict__.update(own)
        self._owned = [proxy.__dict__, *proxy.param_groups, *own.values()]
        self._recorded: list[Change] = []
        self._seen = [_attributes(optimizer), *map(_hyper_parameters, (*groups, *self._dicts))]
        self.mark()

    def _proxy_of(self, original: nn.Parameter) -> nn.Parameter:
        proxy = _parameter_proxy(original)
        self._originals[proxy] = original
        return proxy


def _parameter_proxy(original: nn.Parameter) -> nn.Parameter:
    """Return another parameter in the same memory, with a gradient of its own."""
    proxy = nn.Parameter(original.detach(), requires_grad=original.requires_grad)
    proxy.__dict__.update(original.__dict__)
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


def inner_optimizers(
    optimizer: torch.optim.Optimizer, *, own_state: bool = True
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that an optimizer holds, by their place in it.

    Args:
        optimizer: the outer one.
        own_state: only those whose state is not that of another one of them.
    """
    found: dict[str, torch.optim.Optimizer] = {}
    known = [optimizer]
    stack: list[tuple[str, Any]] = [*_held(optimizer, "")]
    while stack:
        place, value = stack.pop()
        if isinstance(value, torch.optim.Optimizer) and all(value is not one for one in known):
            stack += _held(value, place)
            if not own_state or all(value.state is not one.state for one in known):
                found[place] = value
            known.append(value)
    return found


def complete(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer around another one what torch's constructor sets, if it did not call that.

    Copies of Lookahead, and Accelerate's optimizer, don't. Their class is left as it is: torch
    would wrap its `step` and so break other objects of it that lack these attributes.

    Raises:
        ModelError: it lacks more than that.
    """
    every = [optimizer, *inner_optimizers(optimizer, own_state=False).values()]
    for one in every:
        if "_optimizer_step_pre_hooks" in vars(one):
            continue
        if len(every) == 1 or not (hasattr(one, "param_groups") and hasattr(one, "state")):
            raise ModelError(
                f"{type(one).__name__} does not call torch's constructor, so it has no hooks on "
                f"its step: call super().__init__(parameters, defaults) in its __init__"
            )
        whole = torch.optim.SGD([torch.empty(0)])
        for key in vars(whole):
            if key.startswith("_"):
                vars(one)[key] = getattr(whole, key)
        if not hasattr(one, "defaults"):
            one.defaults = {}


def hookable(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizer and, where its class does not call hooks on `step`, those inside it."""
    if getattr(type(optimizer).step, "hooked", False):
        return [optimizer]
    return [optimizer, *inner_optimizers(optimizer, own_state=False).values()]


def _held(optimizer: torch.optim.Optimizer, place: str) -> Iterator[tuple[str, Any]]:
    """Yield what an optimizer holds in its attributes, in lists and dicts too, by its place."""
    for key, value in vars(optimizer).items():
        yield f"{place}.{key}", value
        if isinstance(value, list | tuple):
            yield from ((f"{place}.{key}.{number}", one) for number, one in enumerate(value))
        elif isinstance(value, dict) and key != "state":
            yield from ((f"{place}.{key}.{name}", one) for name, one in value.items())


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's attributes with plain values."""
    return {
        key: value
        for key, value in optimizer.__dict__.items()
        if isinstance(value, _PLAIN) and key not in _SHARED
    }


def _dicts_of(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the dicts of plain values in the optimizer's attributes; they are taken for groups."""
    return {
        key: value
        for key, value in optimizer.__dict__.items()
        if type(value) is dict
        and key not in (*_SHARED, "defaults")
        and value
        and all(isinstance(one, _PLAIN) for one in value.values())
    }


def _references(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the `id`s of the optimizer's other attributes, which the proxy shares."""
    return {
        key: id(value)
        for key, value in optimizer.__dict__.items()
        if not isinstance(value, _PLAIN) and key not in _SHARED
    }


def _marks(state: Mapping[Any, Any]) -> list[tuple[Any, int]]:
    """Return the values of an optimizer's state, and how often each tensor was written to."""
    return [
        (value, version_of(value) if isinstance(value, torch.Tensor) else 0)
        for own in [*state.values()]
        if isinstance(own, dict)
        for value in own.values()
    ]


def _refuse_replaced_step(optimizer: torch.optim.Optimizer) -> None:
    if has_replaced_step(optimizer):
        raise ContractError(
            f"{type(optimizer).__name__}.step was replaced on the optimizer itself, which steps in "
            f"flight don't call: override step in a subclass, or use max_in_flight=1"
        )


def _refuse_nested(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer inside another one: it would read the gradients of another step."""
    for place in inner_optimizers(optimizer, own_state=False):
        raise ContractError(
            f"{type(optimizer).__name__}{place} is an optimizer inside another one, which the "
            f"gradients of a step in flight don't reach: use max_in_flight=1"
        )


def _refuse_own_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds parameters elsewhere: they lack the gradients of the step."""
    place = own_parameters(optimizer)
    if place is not None:
        raise ContractError(
            f"{type(optimizer).__name__}{place} holds parameters outside of the optimizer's "
            f"param_groups, which the gradients of a step in flight don't reach: read the "
            f"parameters from self.param_groups, or use max_in_flight=1"
        )


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
