"""The fingerprint of a training state: one SHA-256 over everything that training changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import optree
import torch
from torch import nn

from evenstep.errors import ModelError
from evenstep.replicas import inner_optimizers


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 (hexadecimal) of parameters, buffers and optimizer state.

    Entries are sorted by name; each adds its name, dtype, shape and little-endian bytes in
    row-major order. Two runs with the same fingerprint have the same state, bit for bit.
    """
    return digest_of(named_state(model, optimizer))


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
                f"the parameter {name} has no data (it is on torch's meta device): the model was "
                f"moved there, and its values are lost"
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


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the digest of each entry that `named_state` yields, by name."""
    return {name: tensor_digest(value) for name, value in named_state(model, optimizer)}


def tensor_digest(value: Any) -> str:
    """Return the SHA-256 (hexadecimal) of one tensor's dtype, shape and bytes."""
    digest = hashlib.sha256()
    _update(digest, "", value)
    return digest.hexdigest()


def _update(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    else:
        digest.update(f"{name}\0{type(value).__name__}\0{value!r}\0".encode())
