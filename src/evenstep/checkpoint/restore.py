"""Restores model, optimizer and scheduler from a training state, exactly or not at all."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from evenstep.checkpoint.codec import Tree
from evenstep.checkpoint.fingerprint import extra_states, tree_digest
from evenstep.checkpoint.training_state import ModelState, TrainingState
from evenstep.devices.facts import refuse_to_resume
from evenstep.errors import CheckpointError, shown
from evenstep.replicas import inner_optimizers

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler

# Keys beside those of an optimizer's state_dict.
_INNER = "inner_optimizers"  # the state_dicts of those inside it
_HELD = "held_scheduler"  # in a scheduler's, the only key in the place of another scheduler
_ONE = "one_tensor"  # where in the state tensors are that several parameters have in common
_OUTER = "outer_state"  # the state of one around them, whose own state_dict may lose it

# What libraries raise for a state of a different kind than they expect.
_UNFIT = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def restore_all(
    saved: TrainingState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
) -> None:
    """Write a training state into a model, an optimizer and a scheduler.

    Raises:
        CheckpointError: one of them is of a different kind than the saved one.
    """
    settings = [{**group} for group in optimizer.param_groups]
    restore_model(model, saved.model)
    restore_optimizer(optimizer, saved.optimizer)
    if not saved.optimizers:
        _refuse_lost_settings(optimizer, settings)
    _refuse_unfit_settings(optimizer, settings)
    _follow_layouts(model, optimizer, saved.model)
    restore_scheduler(scheduler, saved.scheduler)


@contextmanager
def unchanged_on_error(
    saved: TrainingState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler | None,
) -> Iterator[None]:
    """Put back everything that `restore_all` writes if the block fails."""
    asked = saved.model.extra or {}
    extra = {name: state for name, state in extra_states(model).items() if name in asked}
    extra = copy.deepcopy(extra)
    schedule = copy.deepcopy(scheduler_state(scheduler)) if scheduler is not None else None
    try:
        with rolled_back_on_error([*model.parameters(), *model.buffers()], optimizer):
            yield
    except BaseException:
        restore_scheduler(scheduler, schedule)
        _restore_extra(model, extra)
        raise


def restore_model(model: nn.Module, saved: ModelState) -> None:
    """Write saved parameters and buffers into `model`, in place.

    Raises:
        CheckpointError: names, shapes or dtypes differ; the message names the tensors, and nothing
            is written.
    """
    present = ModelState.of(model)
    refuse_to_resume(saved.facts(), present.facts(), ["tensors", "extra"])
    _restore_extra(model, saved.extra or {})
    with torch.no_grad():
        for name, tensor in present.parameters.items():
            tensor.copy_(saved.parameters[name])
        for name, tensor in present.buffers.items():
            tensor.copy_(saved.buffers[name])


def _restore_extra(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give modules their extra state back, and make sure that they took it."""
    for name, state in saved.items():
        module, problem = model.get_submodule(name), ""
        if tree_digest(module.get_extra_state()) == tree_digest(state):
            continue
        try:
            module.set_extra_state(copy.deepcopy(state))
        except Exception as error:
            problem = f" ({error!r})"
        if problem or tree_digest(module.get_extra_state()) != tree_digest(state):
            raise CheckpointError(
                f"layer {name} of type {type(module).__name__} did not take its extra state back"
                f"{problem}: its set_extra_state must accept what its get_extra_state returned"
            )


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer, and of those inside it with states of their own."""
    state = _state_of_one(optimizer)
    inner = {place: _state_of_one(one) for place, one in inner_optimizers(optimizer).items()}
    return {**state, _INNER: inner, _OUTER: _outer_state(optimizer)} if inner else state


def _state_of_one(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's `state_dict`, and which tensors in it are one, such as a counter."""
    state: dict[str, Any] = optimizer.state_dict()
    places: dict[int, list[list[Any]]] = {}
    for number, of_parameter in state["state"].items():
        for key, value in of_parameter.items() if isinstance(of_parameter, dict) else ():
            if isinstance(value, torch.Tensor):
                places.setdefault(id(value), []).append([number, key])
    common = [some for some in places.values() if len(some) > 1]
    return {**state, _ONE: common} if common else state


def _outer_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return an optimizer's state with the numbers of parameters, not their `id`, as keys.

    Copies of Lookahead write the `id` of parameters into their state_dict.
    """
    numbers = {one: number for number, one in enumerate(_parameters(optimizer))}
    return {numbers.get(key, key): value for key, value in optimizer.state.items()}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Tree) -> None:
    """Restore what `optimizer_state` returned.

    Raises:
        CheckpointError: it is of a different optimizer.
    """
    inner = inner_optimizers(optimizer)
    states = saved.get(_INNER, {})
    if not isinstance(states, dict):
        raise CheckpointError(
            f"the checkpoint has {shown(states)} as optimizers inside another one"
        )
    if inner.keys() != states.keys():
        raise CheckpointError(
            f"the checkpoint is of a different optimizer than {type(optimizer).__name__}: the "
            f"saved one has {len(states)} optimizers inside it, this one has {len(inner)}"
        )
    shared = [one for one in inner.values() if one.param_groups is optimizer.param_groups]
    _restore_one(optimizer, {k: v for k, v in saved.items() if k not in (_INNER, _OUTER)})
    if _OUTER in saved:
        _restore_outer(optimizer, saved[_OUTER])
    for place, one in inner.items():
        _restore_one(one, states[place])
    for one in shared:
        one.param_groups = optimizer.param_groups


def _restore_outer(optimizer: torch.optim.Optimizer, saved: Tree) -> None:
    """Restore what `_outer_state` returned, on the devices of the parameters."""
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for key, value in saved.items():
        if key in range(len(parameters)):
            parameter = parameters[key]
            optimizer.state[parameter] = {k: _beside(v, parameter) for k, v in value.items()}
        else:
            optimizer.state[key] = value


def _beside(value: Any, parameter: torch.Tensor) -> Any:
    """Return a copy of a tensor on the device of its parameter, unless it is a number."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(parameter.device if value.dim() else value.device, copy=True)


def _restore_one(optimizer: torch.optim.Optimizer, saved: Tree) -> None:
    """Restore an optimizer's state with the dtypes and memory layouts with which it was saved.

    `load_state_dict` casts state to the dtype of its parameter; this undoes the cast.
    """
    before = [{**group} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict({key: value for key, value in saved.items() if key != _ONE})
        _share_again(optimizer.param_groups, before)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in saved["state"].get(number, {}).items():
                loaded = optimizer.state[parameter].get(key)
                if not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                    continue
                if loaded.dtype != value.dtype or loaded.stride() != value.stride():
                    optimizer.state[parameter][key] = value.to(loaded.device, copy=True)
        state_of = {n: optimizer.state[p] for n, p in zip(numbers, parameters, strict=True)}
        for (number, key), *others in saved.get(_ONE, ()):
            for other, its_key in others:
                state_of[other][its_key] = state_of[number][key]
    except _UNFIT as error:
        raise CheckpointError(
            f"the checkpoint is of a different optimizer than {type(optimizer).__name__} with "
            f"{len(optimizer.param_groups)} parameter groups: {error!r}"
        ) from error


def _refuse_unfit_settings(
    optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse groups that lack a setting of the optimizer, or have no number where it had one.

    Raises:
        CheckpointError: names the setting.
    """
    groups = optimizer.param_groups
    for number, (group, had) in enumerate(zip(groups, before, strict=True)):
        for key in (key for key in optimizer.defaults if key in had):
            if key in group and _has_form_of(had[key], group[key]):
                continue
            found = shown(group[key]) if key in group else "missing"
            raise CheckpointError(
                f"the checkpoint is of a different optimizer than {type(optimizer).__name__}, or "
                f"damaged: {key} of the saved group {number} is {found}"
            )


def _has_form_of(had: Any, value: Any) -> bool:
    """Whether a value is a number, or as many numbers, if the one before is."""
    if isinstance(had, tuple) and had and all(map(_is_number, had)):
        return (
            isinstance(value, tuple | list)
            and len(value) == len(had)
            and all(map(_is_number, value))
        )
    return _is_number(value) or not _is_number(had) or isinstance(had, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | complex | np.number)


def _share_again(groups: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
    """Let groups hold one tensor as a setting, such as `lr`, where they held one before.

    All groups have that of the optimizer's default, and what writes to one's writes to all.
    """
    first: dict[tuple[str, int], torch.Tensor] = {}
    for group, had in zip(groups, before, strict=True):
        for key, value in had.items():
            own = group.get(key)
            if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
                one = first.setdefault((key, id(value)), own)
                group[key] = one if torch.equal(one, own) else own


def _refuse_lost_settings(
    optimizer: torch.optim.Optimizer, before: Iterable[Iterable[str]]
) -> None:
    """Refuse groups that lack settings which they had before they were restored."""
    for group, names in zip(optimizer.param_groups, before, strict=True):
        lost = [name for name in names if name not in group]
        if lost:
            raise CheckpointError(
                f"the checkpoint is of a different optimizer than {type(optimizer).__name__}: the "
                f"saved parameter groups have no {', '.join(lost)}"
            )


def _follow_layouts(model: nn.Module, optimizer: torch.optim.Optimizer, saved: ModelState) -> None:
    """Lay state out like its parameter where it was so when it was saved.

    Checkpoints of version 0.1.0 hold convolution weights channels-last, whatever the user's are.
    """
    for name, parameter in model.named_parameters():
        before = saved.parameters[name].stride()
        if before == parameter.stride() or parameter not in optimizer.state:
            continue
        layout = parameter.shape, before
        state = optimizer.state[parameter]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and (value.shape, value.stride()) == layout:
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def restore_scheduler(scheduler: Scheduler | None, saved: Tree | None) -> None:
    """Restore a scheduler's state; a checkpoint with one needs one, and vice versa."""
    if (scheduler is None) != (saved is None):
        was, needed = ("without", "none") if saved is None else ("with", "scheduler=...")
        raise CheckpointError(
            f"the checkpoint was saved {was} a learning-rate scheduler: give Trainer.load {needed}"
        )
    if scheduler is not None and saved is not None:
        try:
            load_scheduler(scheduler, saved)
        except _UNFIT as error:
            raise CheckpointError(
                f"the checkpoint is of a different scheduler than {type(scheduler).__name__}: "
                f"{error!r}"
            ) from error


def scheduler_state(scheduler: Scheduler) -> dict[str, Any]:
    """Return a scheduler's `state_dict`; a scheduler that it holds is there with its own state.

    torch's own do so themselves. The `state_dict` that others inherit, such as a warm-up before a
    second scheduler, has the second one itself, and with it the optimizer.
    """
    return {
        name: {_HELD: scheduler_state(value)} if isinstance(value, Scheduler) else value
        for name, value in scheduler.state_dict().items()
    }


def load_scheduler(scheduler: Scheduler, saved: Tree) -> None:
    """Restore what `scheduler_state` returned, also in the schedulers that one holds.

    Raises:
        AttributeError, LookupError, RuntimeError, TypeError, ValueError: it is of another kind.
    """
    state = dict(saved)
    for name, value in saved.items():
        if isinstance(value, dict) and value.keys() == {_HELD}:
            state[name] = getattr(scheduler, name)
            load_scheduler(state[name], value[_HELD])
    scheduler.load_state_dict(state)


@contextmanager
def rolled_back_on_error(
    tensors: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Restore tensors and optimizer state if the block fails, possibly after half its work."""
    tensors = [tensor.detach() for tensor in tensors]
    before = [tensor.clone() for tensor in tensors]
    saved = copy.deepcopy(optimizer_state(optimizer))
    try:
        yield
    except BaseException:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        restore_optimizer(optimizer, saved)
        raise
