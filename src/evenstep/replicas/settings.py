"""The settings of layers and optimizers as text, to be compared between processes."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

from evenstep.errors import shown
from evenstep.replicas.optimizer_proxy import inner_optimizers

_OF_KNOWN_LAYERS = ("torch.nn.", "evenstep.nn.")
_PLAIN = (bool, int, float, complex, str, type(None))


def layer_settings(prefix: str, module: nn.Module) -> dict[str, str]:
    """Return the class of each layer by name, and the settings of torch's and of ours.

    Settings are what a layer was made with. What else users note in a layer is theirs.
    """
    found = {}
    for name, layer in module.named_modules():
        kind = type(layer)
        is_known = kind.__module__.startswith(_OF_KNOWN_LAYERS)
        shown = [
            f"{key}={value!r}"
            for key, value in vars(layer).items()
            if is_known and key in _settings_of(kind) and is_plain_value(value)
        ]
        found[f"{prefix} {name}".rstrip()] = f"{kind.__name__}({', '.join(shown)})"
    return found


def _settings_of(kind: type[nn.Module]) -> set[str]:
    constants = getattr(kind, "__constants__", ())
    return {*inspect.signature(kind.__init__).parameters, *constants} - {"inplace"}


def plain_attributes(module: nn.Module) -> dict[str, str]:
    """Return the mode of each layer, and its numbers and strings, as text by name."""
    return {
        f"{name}.{key}".removeprefix("."): shown(value)
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if not key.startswith("_") and is_plain_value(value)
    }


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the class and the plain settings of an optimizer, and of those inside it, by name."""
    found = {}
    for place, one in {"": optimizer, **inner_optimizers(optimizer)}.items():
        of = f" of optimizer{place}" if place else ""
        found[f"the class of the optimizer{place}"] = type(one).__qualname__
        for number, group in enumerate(one.param_groups):
            found[f"the number of parameters in group {number}{of}"] = str(len(group["params"]))
            for key, value in group.items():
                plain = value.tolist() if isinstance(value, torch.Tensor) else python_number(value)
                if key != "params" and is_plain_value(plain):
                    found[f"{key} of parameter group {number}{of}"] = repr(plain)
    return found


def python_number(value: Any) -> Any:
    """Convert a number of numpy to one of Python; return anything else unchanged."""
    return value.item() if isinstance(value, np.bool_ | np.number) else value


def is_plain_value(value: object) -> bool:
    """Whether a value is a number, a string, a bool, None, or a list or tuple of these."""
    if type(value) in (list, tuple):
        return all(map(is_plain_value, value))  # type: ignore[call-overload]
    return type(value) in _PLAIN
