"""A model that is recorded: its tensors by name, and what they were when last looked at."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from evenstep.recording.digests import RecentlyKept
from evenstep.recording.watching import WRAPPED
from evenstep.replicas import original_of

_WRAPPERS = (*(f"{name}." for name in WRAPPED),)

_MOST_NBYTES_OF_TEXT = 200


class RecordedModel:
    """A model that was called by itself: not from another module.

    The module is held weakly.

    Attributes:
        name: its name in the record: "" for the first model.
        watched: by `id` the parameters whose gradients are noted.
    """

    def __init__(self, module: nn.Module, number: int, kept: RecentlyKept) -> None:
        self.module = weakref.ref(module)
        self.number = number
        self.name = f"model {number}" if number else ""
        self.watched: set[int] = set()
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._cores = weakref.WeakSet(_cores_of(module))
        self._kept = kept
        self._digests: dict[str, Any] = {}
        self._is_compared = True

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is a part of the model."""
        mine, module = self.module(), original_of(module)
        return mine is not None and any(one is module for one in mine.modules())

    def is_called_by(self, module: nn.Module) -> bool:
        """Whether a call of a module is one of the model: it is the model, or wraps it."""
        return self.module() is module or module in self._wrappers

    def is_core(self, module: nn.Module) -> bool:
        """Whether a part of the model has all its parameters, so that it may be called instead."""
        return module in self._cores

    def is_wrapped_by(self, module: nn.Module) -> bool:
        """Whether a module holds the model and has no other parameters."""
        mine = self.module()
        if mine is None or all(one is not mine for one in module.modules()):
            return False
        if {*map(id, module.parameters())} != {*map(id, mine.parameters())}:
            return False
        self._wrappers.add(module)
        return True

    def spell(self, name: str) -> str:
        """Return what a module or tensor of the model is called in the record."""
        return ": ".join(filter(None, (self.name, bare(name))))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters by what they are called in the record."""
        mine = self.module()
        for name, one in () if mine is None else mine.named_parameters():
            yield self.spell(name), one

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the buffers by what they are called in the record."""
        mine = self.module()
        for name, one in () if mine is None else mine.named_buffers():
            yield self.spell(name), one

    def keep_weights(self) -> dict[str, Any]:
        """Return what is kept of the parameters, by name."""
        kept = self._kept.kept_by_name(self.parameters())
        self._digests = {name: one[0] for name, one in kept.items()}
        self._is_compared = False
        return kept

    def changed_weights(self) -> dict[str, Any]:
        """Return what is kept of the parameters that have changed since they were kept.

        Of those that change after the first call since, none is seen.
        """
        if self._is_compared:
            return {}
        self._is_compared = True
        return {
            name: kept
            for name, kept in self._kept.kept_by_name(self.parameters()).items()
            if name in self._digests and kept[0] != self._digests[name]
        }

    def forget_weights(self) -> None:
        """Compare with nothing: an update was not recorded."""
        self._digests = {}


def _cores_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a module that have all its parameters, from the outside in."""
    held = {*map(id, module.parameters())}
    inner: nn.Module | None = module
    while held and inner is not None:
        children = inner.children()
        inner = next((one for one in children if {*map(id, one.parameters())} == held), None)
        if inner is not None:
            yield inner


def bare(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    name += "."
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name.removesuffix(".")


def settings_of_modules(module: nn.Module) -> dict[str, str]:
    """Return what modules say of their settings, by name: "p=0.5, inplace=False"."""
    found = {}
    for name, child in module.named_modules():
        with contextlib.suppress(Exception):  # of the user's code
            if text := child.extra_repr():
                found[bare(name)] = text[:_MOST_NBYTES_OF_TEXT]
    return found


def place_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what tensors in the same memory have in common; None of an empty one."""
    return (tensor.data_ptr(), tensor.shape, tensor.device) if tensor.numel() else None


def wrappers_of(module: nn.Module) -> list[str]:
    """Return the classes that wrap the model that a module holds."""
    inner = getattr(module, "module", None)
    return [type(module).__name__] if isinstance(inner, nn.Module) else []
