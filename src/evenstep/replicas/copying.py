"""Copies the user's module for another device, and moves it to the first one."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import nn

from evenstep.devices import Device, carry
from evenstep.devices.addresses import align, rounding
from evenstep.errors import ContractError, ModelError, text_of
from evenstep.private_torch.modules import own_buffers
from evenstep.replicas.checks import Members
from evenstep.replicas.computed_before import StandIn

_ORIGINALS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]
_ORIGINALS = weakref.WeakKeyDictionary()


def move_home(
    model: nn.Module, members: Members, optimizer: torch.optim.Optimizer, device: Device
) -> None:
    """Move the user's model and the optimizer's state to `device`, in place."""
    target = device.torch_device
    if any(parameter.device != target for _, parameter in members.parameters):
        with _keeping_parameters(target):
            model.to(target)
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[key] = value.to(target)


@contextmanager
def _keeping_parameters(target: torch.device) -> Iterator[None]:
    """Inside `with`, `module.to(target)` keeps the parameter objects, which optimizers refer to.

    It gives a parameter new data, but new parameters to a module where tensors on `target` are of
    a different type in C++ (accelerators of extensions). There, their contents can be swapped.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.empty(0).data = torch.empty(0, device=target)
    except RuntimeError:
        torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def align_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Move an optimizer's state to multiples of 64 bytes, where nothing can notice it.

    State that something else holds too stays where it is. Torch's own optimizers compute each
    element by itself, wherever it lies, except for those that multiply.

    Raises:
        ContractError: the update may multiply state that stays.
    """
    for owner, state in optimizer.state.items():
        leaves: list[Any] = optree.tree_leaves(state)
        if align(rounding(leaves)) and _may_multiply(optimizer):
            names = {id(one): name for name, one in model.named_parameters()}
            raise ContractError(
                f"the state of {type(optimizer).__name__} for {names.get(id(owner), 'a parameter')}"
                f" does not begin at a multiple of 64 bytes, in memory that something else holds "
                f"too (a flat tensor, a numpy array, a mapped file), so the bits of products may "
                f"differ the next time: load clones, value.clone() of each tensor in the state dict"
            )


def _may_multiply(optimizer: torch.optim.Optimizer) -> bool:
    multiplying = torch.optim.LBFGS, getattr(torch.optim, "Muon", torch.optim.LBFGS)
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return not is_torchs or isinstance(optimizer, multiplying)


def copy_parameter(parameter: nn.Parameter, device: Device, *, share: bool) -> nn.Parameter:
    """Return a replica's parameter, which has or shares the values of another one, and its strides.

    Kernels may round differently for other strides, even where these leave gaps in memory.
    """
    data = parameter.detach() if share else carry(parameter, device)
    if data.stride() != parameter.stride():
        empty = data.new_empty_strided(parameter.shape, parameter.stride())
        data = empty.copy_(data)
    return nn.Parameter(data, requires_grad=parameter.requires_grad)


def copy_module(module: nn.Module, parameters: dict[int, nn.Parameter]) -> nn.Module:
    """Return a copy of a module.

    Args:
        module: the module.
        parameters: the copy's parameters, by the `id` of the module's own, whose attributes they
            get copies of.

    Raises:
        ModelError: it can't be copied.
        ContractError: the copy has layers in common with the module.
    """
    try:
        held = [value for child in module.modules() for value in vars(child).values()]
        known: dict[int, Any] = {**_empty_copies(held), **_copied_tensors(held), **parameters}
        copied = copy.deepcopy(module, known)
    except Exception as error:
        raise ModelError(
            f"the model {type(module).__name__} can't be copied for a second device: "
            f"copy.deepcopy(model) fails with {type(error).__name__}: {text_of(error)}. Keep "
            f"locks, files and computed tensors out of its attributes (or give it __deepcopy__), "
            f"or train on one device"
        ) from error
    for parameter in module.parameters():
        if own := vars(parameter):
            there = vars(parameters[id(parameter)])
            there.update((key, _copied_if_possible(value, known)) for key, value in own.items())
    _refuse_shared(module, copied)
    _ORIGINALS[copied] = weakref.ref(original_of(module))
    return copied


def _copied_if_possible(value: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a parameter's attribute, or itself: some hold groups of processes."""
    try:
        return copy.deepcopy(value, known)
    except Exception:
        return value


def move_buffers(module: nn.Module, places: Sequence[Device]) -> None:
    """Move the buffers of each of a module's layers to a device of its own.

    Args:
        module: the module, whose parameters lie there already.
        places: the device of every layer, in the order of `modules()`.
    """
    moved: dict[int, torch.Tensor] = {}
    for child, place in zip(module.modules(), places, strict=True):
        for key, buffer in own_buffers(child).items():
            if buffer is not None:
                there = moved.get(id(buffer))
                own_buffers(child)[key] = moved[id(buffer)] = (
                    buffer.to(place.torch_device) if there is None else there
                )


def original_of(module: nn.Module) -> nn.Module:
    """Return the user's module that a module is a copy of; the module itself if it is none."""
    original = _ORIGINALS.get(module)
    return module if original is None else original() or module


def _refuse_shared(module: nn.Module, copied: nn.Module) -> None:
    """Refuse a copy that has modules in common with the original, in which lanes would race."""
    present = {id(one) for one in copied.modules()}
    for name, one in module.named_modules():
        if id(one) in present:
            raise ContractError(
                f"copy.deepcopy returns {f'the module {name}' if name else 'the model'} itself "
                f"({type(one).__name__}.__deepcopy__), so devices would compute with one object at "
                f"the same time: return a copy from __deepcopy__, or leave it out"
            )


def _empty_copies(held: Sequence[Any]) -> dict[int, Any]:
    """Return copies of empty dicts, by `id`; a module has some ten of them, for hooks and parts.

    `copy.deepcopy` takes 5 µs for each.
    """
    kinds = dict, OrderedDict
    return {id(one): type(one)() for one in held if type(one) in kinds and not one}


def _copied_tensors(held: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return copies, by the `id` of the original, of tensors that `copy.deepcopy` refuses.

    These are results of a forward pass that layers keep in attributes, which have a graph, and
    sparse tensors in compressed layouts.
    """
    every: Any = held
    leaves: list[Any] = optree.tree_leaves(every)
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return {
        id(one): one.detach().clone()
        for one in tensors
        if type(one) is not StandIn
        and (one.grad_fn is not None or one.layout not in (torch.strided, torch.sparse_coo))
    }
