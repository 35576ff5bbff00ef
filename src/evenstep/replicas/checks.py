"""Refuses models and optimizers that can't be trained, with the reason and the way out."""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evenstep.errors import ContractError, ModelError
from evenstep.private_torch.modules import is_compiled, sum_hooks

_ANYWAY = {"param_groups", "state", "step"}  # attributes of an optimizer that lead to parameters
_LEAVES = (torch.Tensor, bool, int, float, complex, str, type(None))
_LOOKED_AT = 100_000  # objects in an optimizer's attributes, to find parameters there


def check_trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model or an optimizer that can't be trained.

    Raises:
        ContractError: a layer was compiled by the user.
        ModelError: the model has lazy parameters or hooks on accumulated gradients, or the
            optimizer holds parameters that are not the model's.
    """
    _refuse_wrapped(model)
    _refuse_scripted(model)
    refuse_hooks_on_sums(model)
    _refuse_compiled(model)
    _refuse_without_data(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ModelError(
                f"the parameter {name} has no shape yet: run one batch through the model first"
            )
    refuse_strangers(model, optimizer)


def refuse_strangers(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds parameters which are not the model's, or not any more."""
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise ModelError(
            f"the optimizer holds {strangers} of {len(held)} parameters that are not the model's: "
            f"make it from model.parameters(), after the last change to the model"
        )


def _refuse_wrapped(model: nn.Module) -> None:
    wrappers = nn.DataParallel, nn.parallel.DistributedDataParallel
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            raise ModelError(
                f"{f'the layer {name}' if name else 'the model'} is a {type(module).__name__}: "
                f"give the module inside it, model.module, because the trainer itself divides each "
                f"batch among the devices"
            )


def _refuse_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{f'the layer {name}' if name else 'the model'} was made by torch.jit.script or "
                f"torch.jit.trace, which hides its layers: give the module that it was made from"
            )


def _refuse_without_data(model: nn.Module) -> None:
    """Refuse parameters and buffers that can't be copied to a device, or shared."""
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if value.is_meta and not isinstance(value, nn.UninitializedParameter):
            raise ModelError(
                f"{name} of the model has no data (it is on torch's meta device): build the model "
                f"on a device, or fill model.to_empty(device=...)"
            )
        if isinstance(value, nn.Parameter) and value.layout is not torch.strided:
            raise ModelError(
                f"{name} of the model is a sparse tensor ({value.layout}): train a dense one, such "
                f"as {name}.to_dense()"
            )


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse layers that the user has compiled.

    How their code rounds depends on which shapes were seen first, and on what else was compiled at
    the same time (measured with ResNet and Inductor: two trainings on one device differ).
    """
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ContractError(
                f"{f'the layer {name}' if name else 'the model'} was compiled by torch.compile, so "
                f"its rounding depends on which shards were computed first: give the module itself "
                f"and use Experiment(compile=True), which compiles each size of shard once"
            )


def refuse_hooks_on_sums(model: nn.Module) -> None:
    """Refuse hooks on accumulated gradients, which would see sums of some shards.

    Those of a recorder (`evenstep record`) change nothing.
    """
    for name, parameter in model.named_parameters():
        hooks = (sum_hooks(parameter) or {}).values()
        if any(not getattr(hook, "only_reads", False) for hook in hooks):
            raise ContractError(
                f"the parameter {name} has a hook on its accumulated gradient, which would get "
                f"sums over only some shards: change the mean gradient in before_update=..., or "
                f"use register_hook, whose hooks get the mean gradient"
            )


def refuse_unwritable(model: nn.Module) -> None:
    """Refuse parameters and buffers that can't be written in place, or compared bit by bit."""
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(value) or value.is_meta:
            continue
        kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            layout = "quantized" if value.is_quantized else f"sparse ({value.layout})"
            raise ModelError(
                f"the {kind} {name} is {layout}, which can't be written in place and compared bit "
                f"by bit: register a dense tensor"
            )
        if value.is_inference():
            raise ModelError(
                f"the {kind} {name} was made in torch.inference_mode, so it can't be written: "
                f"register {name}.clone(), outside of that mode"
            )
        if any(size > 1 and not stride for size, stride in zip(value.shape, value.stride())):  # noqa: B905
            raise ModelError(
                f"the {kind} {name} of shape {tuple(value.shape)} is expanded (several elements "
                f"are one number in memory), so it can't be written: register {name}.contiguous()"
            )


def refuse_aliases(model: nn.Module) -> None:
    """Refuse a buffer that a shard's forward pass could not have of its own."""
    places = {_memory(parameter): name for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        place = _memory(buffer)
        if place is not None and place in places:
            raise ContractError(
                f"the buffer {name} shares memory with the parameter {places[place]}, but every "
                f"shard begins with buffers of its own: register a copy (`.detach().clone()`) and "
                f"write it in after_update=..., or compute the view in forward"
            )


def _memory(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has none."""
    if tensor.layout is not torch.strided or nn.parameter.is_lazy(tensor):
        return None
    return tensor.untyped_storage().data_ptr() or None


def check_followed(
    model: nn.Module, optimizer: torch.optim.Optimizer, known: set[nn.Parameter]
) -> None:
    """Refuse parameters that a change of the model has brought, and that nothing would train.

    Args:
        model: the user's module, with other layers than before.
        optimizer: the user's optimizer.
        known: the parameters that the model had before.

    Raises:
        ContractError: a new parameter that requires a gradient is in no group of the optimizer.
    """
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in known and id(parameter) not in held
    ]
    if missing:
        raise ContractError(
            f"the model was given new parameters that the optimizer does not hold, so they would "
            f"not be trained: {_listed(missing)}. Add them with optimizer.add_param_group(...), "
            f"freeze them with requires_grad_(False), or make a new optimizer and trainer"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def written_error(names: list[str]) -> ContractError:
    """Return the error for parameters that were written while shards were computed."""
    many = len(names) > 1
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return ContractError(
        f"the parameter{'s' * many} {shown} {'were' if many else 'was'} written in forward or in "
        f"the objective, which every shard calls, several at the same time: write parameters (a "
        f"momentum encoder, an average of the weights) once for each step, in "
        f"Trainer(after_update=...)"
    )


def own_parameters(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the place in an optimizer's attributes that leads to parameters of it, if one does.

    Looked through are containers, objects, modules, and what functions refer to.
    """
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    own = vars(optimizer).items()
    stack = [(f".{k}", v) for k, v in own if k not in _ANYWAY and not k.startswith("_optimizer_")]
    groups = optimizer.param_groups
    seen = {*map(id, [optimizer, groups, optimizer.state]), *(id(one["params"]) for one in groups)}
    while stack and len(seen) < _LOOKED_AT:
        place, value = stack.pop()
        if id(value) in held:
            return place
        if id(value) not in seen and not isinstance(value, _LEAVES):
            seen.add(id(value))
            stack += [(place, one) for one in _inside(value)]
    return None


def _inside(value: Any) -> list[Any]:
    """Return what a value refers to."""
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return []
    found = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, Mapping):
        found += [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        found += value
    elif isinstance(value, types.FunctionType):
        found += [*(value.__defaults__ or ()), *map(_content, value.__closure__ or ())]
    elif isinstance(value, types.MethodType):
        found += [value.__self__, value.__func__]
    elif isinstance(value, functools.partial):
        found += [value.func, *value.args, *value.keywords.values()]
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None
