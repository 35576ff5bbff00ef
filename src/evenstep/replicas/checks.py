"""Refuses models and optimizers that can't be trained, with the reason and the way out."""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from evenstep.errors import ContractError, ModelError
from evenstep.private_torch.graph import first_with_hooks_on_sum
from evenstep.private_torch.modules import (
    forward_hooks,
    forward_pre_hooks,
    is_compiled,
    own_buffers,
    own_modules,
    sum_hooks,
)


class Members(NamedTuple):
    """The layers, parameters and buffers of a model, with their names; each once.

    Walking through a model of a thousand layers takes some milliseconds, so it is done once.
    """

    modules: Sequence[tuple[str, nn.Module]]
    parameters: Sequence[tuple[str, nn.Parameter]]
    buffers: Sequence[tuple[str, torch.Tensor]]

    @classmethod
    def of(cls, model: nn.Module) -> Members:
        """Walk through a model."""
        parameters, buffers = [*model.named_parameters()], [*model.named_buffers()]
        return cls([*model.named_modules()], parameters, buffers)

    @property
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and the buffers."""
        return itertools.chain(self.parameters, self.buffers)


_ANYWAY = {"param_groups", "state", "step"}  # attributes of an optimizer that lead to parameters
_LEAVES = (torch.Tensor, bool, int, float, complex, str, type(None))
_LOOKED_AT = 100_000  # objects in an optimizer's attributes, to find parameters there


def check_trainable(members: Members, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model or an optimizer that can't be trained.

    Raises:
        ContractError: a layer was compiled by the user.
        ModelError: the model has lazy parameters, or the optimizer holds parameters that are not
            the model's.
    """
    for name, module in members.modules:
        where = f"the layer {name}" if name else "the model"
        _refuse_wrapped(where, module)
        _refuse_scripted(where, module)
        _refuse_compiled(where, module)
    _refuse_without_data(members)
    for name, parameter in members.parameters:
        if nn.parameter.is_lazy(parameter):
            raise ModelError(
                f"the parameter {name} has no shape yet: run one batch through the model first"
            )
    refuse_strangers((one for _, one in members.parameters), optimizer)


def refuse_strangers(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds parameters which are not the model's, or not any more."""
    known = {*map(id, parameters)}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise ModelError(
            f"the optimizer holds {strangers} of {len(held)} parameters that are not the model's: "
            f"make it from model.parameters(), after the last change to the model"
        )


def _refuse_wrapped(where: str, module: nn.Module) -> None:
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"{where} is a {type(module).__name__}: give the module inside it, model.module, "
            f"because the trainer itself divides each batch among the devices"
        )


def _refuse_scripted(where: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{where} was made by torch.jit.script or torch.jit.trace, which hides its layers: "
            f"give the module that it was made from"
        )


def _refuse_without_data(members: Members) -> None:
    """Refuse parameters and buffers that can't be copied to a device, or shared."""
    for name, value in members.tensors:
        if value.is_meta and not isinstance(value, nn.UninitializedParameter):
            raise ModelError(
                f"{name} of the model has no data (it is on torch's meta device): build the model "
                f"on a device, or fill model.to_empty(device=...)"
            )
        if value.layout is not torch.strided and isinstance(value, nn.Parameter):
            raise ModelError(
                f"{name} of the model is a sparse tensor ({value.layout}): train a dense one, such "
                f"as {name}.to_dense()"
            )


def _refuse_compiled(where: str, module: nn.Module) -> None:
    """Refuse a layer that the user has compiled.

    How its code rounds depends on which shapes were seen first, and on what else was compiled at
    the same time (measured with ResNet and Inductor: two trainings on one device differ).
    """
    if is_compiled(module):
        raise ContractError(
            f"{where} was compiled by torch.compile, so its rounding depends on which shards were "
            f"computed first: give the module itself and use Experiment(compile=True), which "
            f"compiles each size of shard once"
        )


def refuse_hooks_on_sums(members: Members) -> None:
    """Refuse hooks on accumulated gradients, which would see sums of some shards.

    Those of a recorder (`evenstep record`) change nothing.
    """
    for name, parameter in members.parameters:
        hooks = (sum_hooks(parameter) or {}).values()
        if any(not getattr(hook, "only_reads", False) for hook in hooks):
            raise _hook_error(name)


def refuse_hooks_on_nodes(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse hooks on the nodes that add to gradients, as scripts for DDP set them."""
    number = first_with_hooks_on_sum(parameters)
    if number is not None:
        raise _hook_error(names[number])


def _hook_error(name: str) -> ContractError:
    return ContractError(
        f"the parameter {name} has a hook on its accumulated gradient, which would get "
        f"sums over only some shards: change the mean gradient in before_update=..., or "
        f"use register_hook, whose hooks get the mean gradient"
    )


def refuse_unwritable(members: Members) -> None:
    """Refuse parameters and buffers that can't be written in place, or compared bit by bit."""
    for name, value in members.tensors:
        if value.is_meta or nn.parameter.is_lazy(value):
            continue
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            layout = "quantized" if value.is_quantized else f"sparse ({value.layout})"
            raise ModelError(
                f"{_named(name, value)} is {layout}, which can't be written in place and compared "
                f"bit by bit: register a dense tensor"
            )
        if value.is_inference():
            raise ModelError(
                f"{_named(name, value)} was made in torch.inference_mode, so it can't be written: "
                f"register {name}.clone(), outside of that mode"
            )
        strides = value.stride()
        if 0 in strides and any(
            size > 1 and not stride for size, stride in zip(value.shape, strides, strict=True)
        ):
            raise ModelError(
                f"{_named(name, value)} of shape {tuple(value.shape)} is expanded (several "
                f"elements are one number in memory), so it can't be written: register "
                f"{name}.contiguous()"
            )


def _named(name: str, value: torch.Tensor) -> str:
    return f"the {'parameter' if isinstance(value, nn.Parameter) else 'buffer'} {name}"


def refuse_aliases(members: Members) -> None:
    """Refuse a buffer that a shard's forward pass could not have of its own."""
    if not members.buffers:
        return
    places = {_memory(parameter): name for name, parameter in members.parameters}
    for name, buffer in members.buffers:
        place = _memory(buffer)
        if place is not None and place in places:
            raise ContractError(
                f"the buffer {name} shares memory with the parameter {places[place]}, but every "
                f"shard begins with buffers of its own: register a copy (`.detach().clone()`) and "
                f"write it in after_update=..., or compute the view in forward"
            )


def refuse_buffers_in_closures(members: Members) -> None:
    """Refuse forward hooks and functions in attributes that read buffers of the user's own module.

    A copy of the model calls the same function, whose closure holds the user's module.
    """
    own = {id(module): name for name, module in members.modules}
    for name, module in members.modules if members.buffers else ():
        hooks = (*forward_hooks(module).values(), *forward_pre_hooks(module).values())
        for function in (*hooks, *vars(module).values()):
            for buffer in _buffers_read(function, own):
                raise ContractError(
                    f"a hook or an attribute of {f'the layer {name}' if name else 'the model'} is "
                    f"the function {function.__qualname__}, which reads the buffer {buffer} from "
                    f"its closure: on a copy of the model it would read the buffer of another "
                    f"device. Make it a method, or a module that holds the buffer"
                )


def _buffers_read(function: Any, own: Mapping[int, str]) -> Iterator[str]:
    """Yield the names of buffers that a function reads as `module.buffer` or `module.part.buffer`.

    Args:
        function: any object.
        own: the names of the model's modules, by `id`.
    """
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    held = {key: one for key, cell in cells if id(one := _content(cell)) in own}
    found: Any = None
    for step in dis.get_instructions(function) if held else ():
        if step.opname == "LOAD_DEREF":
            found = held.get(step.argval)
        elif step.opname == "LOAD_ATTR" and found is not None:
            if step.argval in own_buffers(found):
                yield f"{own[id(found)]}.{step.argval}".removeprefix(".")
            found = own_modules(found).get(step.argval)
        else:
            found = None


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
