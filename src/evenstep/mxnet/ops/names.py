"""Names that a module of MXNet has beside its own: older spellings, and answers to missing ones."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

_NONE: Mapping[str, Any] = MappingProxyType({})


def lookup(
    module: str, there: Sequence[str], *, modules: Mapping[str, str] = _NONE
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module.

    Args:
        module: its name in `evenstep.mxnet`, such as "gluon.nn"; empty for that itself.
        there: the names that it has.
        modules: other names of modules, and where these lie in `evenstep.mxnet`.
    """

    def found(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"evenstep.mxnet.{modules[name]}")
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(missing(module, name, there))

    return found


def missing(module: str, name: str, there: Sequence[str]) -> str:
    """Return the message on a name that is not there, with the names that are close to it.

    Args:
        module: the module's name in `evenstep.mxnet`; empty for that itself.
        name: the name.
        there: the names that are there.
    """
    lower = {one.lower(): one for one in there}
    near = difflib.get_close_matches(name.lower(), lower, 5, 0.6)
    near += [one for one in lower if name.lower() in one and one not in near][:5]
    hint = f"close to it: {', '.join(lower[one] for one in near)}; " if near else ""
    whole = ".".join(["evenstep.mxnet", module]).rstrip(".")
    return f"{whole} has no {name!r}: {hint}`dir({module or 'mx'})` lists all {len(there)} names"
