"""The fingerprint of a training state: one SHA-256 over everything that training changes.

Version 1 covers parameters, buffers and the optimizer's state of each parameter. Version 2 covers
what decides the next step: also the settings of the optimizer's groups, its state that
belongs to no parameter, and the extra state of modules. Which parameters are frozen is in neither
(a checkpoint holds it). Old figures are compared by version 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import optree
import torch
from torch import nn

from evenstep.devices.addresses import bytes_of
from evenstep.errors import ModelError
from evenstep.replicas import inner_optimizers, python_number

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor)


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 (hexadecimal) of parameters, buffers and optimizer state.

    Entries are sorted by name; each adds its name, dtype, shape and little-endian bytes in
    row-major order. Two runs with the same fingerprint have the same state, bit for bit.
    """
    return digest_of(named_state(model, optimizer))


def fingerprint_2(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the fingerprint of version 2 (hexadecimal): the SHA-256 of all that decides a step.

    As version 1, with entries for the settings of the optimizer's groups, its state that belongs to
    no parameter, and the extra state of modules. Numbers of numpy count as those of Python, and
    lists as tuples: a checkpoint doesn't keep the difference.
    """
    return digest_of(whole_state(model, optimizer))


def digest_of(entries: Iterable[tuple[str, Any]]) -> str:
    """Return the fingerprint over the entries that `named_state` yields."""
    digest = hashlib.sha256()
    for name, value in sorted(entries, key=lambda entry: entry[0]):
        _update(digest, name, value)
    return digest.hexdigest()


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all parameters, buffers and leaves of the optimizer's state.

    State of parameters that the model has no more is left out: training doesn't use it.
    """
    names: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        if parameter.is_meta:
            raise ModelError(
                f"the parameter {name} has no data (it is on torch's meta device): moving a model "
                f"there discards its values, so leave it where it was"
            )
        yield f"parameter/{name}", parameter.detach()
    for name, buffer in model.named_buffers():
        yield f"buffer/{name}", buffer
    for place, one in {"": optimizer, **inner_optimizers(optimizer)}.items():
        for owner, state in one.state.items():
            if owner not in names:
                continue
            tree: Any = dict(state)
            paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True)
            for path, leaf in zip(paths, leaves, strict=True):
                yield f"optimizer{place}/{names[owner]}/{'/'.join(map(str, path))}", leaf


def owned_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield those entries of `whole_state` that only a parameter's owner has: optimizer state."""
    for name, value in named_state(model, optimizer):
        if name.startswith("optimizer"):
            yield name, _plain(value)


def common_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield those entries of `whole_state` that every process has, whoever owns parameters."""
    own = {name for name, _ in owned_state(model, optimizer)}
    return (entry for entry in whole_state(model, optimizer) if entry[0] not in own)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything that decides the next step, settings first."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizers = {"": optimizer, **inner_optimizers(optimizer)}
    for place, one in optimizers.items():
        for number, group in enumerate(one.param_groups):
            members = [names.get(parameter) for parameter in group["params"]]
            yield from _leaves(f"group{place}/{number}", {**group, "params": members})
    for name, state in extra_states(model).items():
        yield from _leaves(f"extra/{name}", state)
    for name, value in named_state(model, optimizer):
        yield name, _plain(value)
    for place, one in optimizers.items():
        for key, value in one.state.items():
            if not isinstance(key, torch.Tensor):
                yield from _leaves(f"optimizer{place}/{key}", value)


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return what modules have besides parameters and buffers (`get_extra_state`), by name."""
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def frozen_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that require no gradient, though their dtype has them."""
    return [
        name
        for name, one in model.named_parameters()
        if not one.requires_grad and (one.is_floating_point() or one.is_complex())
    ]


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the digest of each entry that `whole_state` yields, by name."""
    return {name: tensor_digest(value) for name, value in whole_state(model, optimizer)}


def tensor_digest(value: Any) -> str:
    """Return the SHA-256 (hexadecimal) of one tensor's dtype, shape and bytes."""
    digest = hashlib.sha256()
    _update(digest, "", value)
    return digest.hexdigest()


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything in nested mappings, lists and tuples."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(f"{name}/{number}", item)
    else:
        yield name, _plain(value)


def _plain(value: Any) -> Any:
    """Return a value whose `repr` says all of it: a number of Python for one of numpy.

    What is neither a plain value nor a tensor can't be compared: of it, its type is returned.
    """
    value = python_number(value)
    is_plain = isinstance(value, _PLAIN)
    return value if is_plain else f"{type(value).__module__}.{type(value).__qualname__}"


def tree_digest(value: Any) -> str:
    """Return the SHA-256 (hexadecimal) of everything in nested mappings, lists and tuples."""
    return digest_of(_leaves("", value))


def pieces_of(name: str, value: Any) -> tuple[bytes, torch.Tensor | None]:
    """Return what the fingerprint covers of an entry: a header, and the tensor behind it if any."""
    if isinstance(value, torch.Tensor):
        return f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode(), value
    return f"{name}\0{type(value).__name__}\0{value!r}\0".encode(), None


def _update(digest: Any, name: str, value: Any) -> None:
    header, data = pieces_of(name, value)
    digest.update(header)
    if data is not None:
        digest.update(bytes_of(data).numpy().data)
