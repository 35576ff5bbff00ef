"""Private names of torch: looked up once, and what happens where a version of torch lacks one.

Where there is a public way, it is taken instead, with the same bits, though slower. Else no trainer
can be built: the error says what is missing. All names were seen in each version of TESTED_TORCH,
except where a comment says otherwise.
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from evenstep.errors import VersionError

TESTED_TORCH = ("2.6.0", "2.8.0", "2.9.1", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The versions that this revision was tested with: `make versions` writes what works in each."""

RECOMMENDED_TORCH = "2.13.0"
"""The version with which all tests and all figures were made."""


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """A private name of torch.

    Attributes:
        path: where it stands, such as "torch._C._storage_Use_Count".
        purpose: what evenstep reads it for.
        has_public_way: whether something public is used where it is missing.
        needed: whether no trainer can be built without it; else only what uses it fails.
        is_there: whether this version of torch has it; True where it is looked up later.
        is_in_recommended: whether RECOMMENDED_TORCH has it.
    """

    path: str
    purpose: str
    has_public_way: bool
    needed: bool
    is_there: bool = True
    is_in_recommended: bool = True


_NAMES: list[PrivateName] = []


def private(
    owner: str,
    name: str,
    purpose: str,
    *,
    public_way: Any = None,
    needed: bool = True,
    in_recommended: bool = True,
) -> Any:
    """Return what a module or class of torch calls `name`.

    Args:
        owner: the module or class, as it is written in Python.
        name: the name in it.
        purpose: what it is for, after "which evenstep reads to".
        public_way: what to return where it is missing.
        needed: whether no trainer can be built without it.
        in_recommended: whether RECOMMENDED_TORCH has it.

    Returns:
        Where it is missing and there is no public way, something that raises a VersionError when it
        is called.
    """
    path = f"{owner}.{name}"
    try:
        found = lookup(pkgutil.resolve_name(owner), name, path)
    except (ImportError, AttributeError):
        return _missing(path, purpose, public_way, needed, in_recommended=in_recommended)
    _note(path, purpose, public_way, needed, in_recommended=in_recommended)
    return found


def attribute(
    sample: object, name: str, purpose: str, *, public_way: Callable[[Any], Any] | None = None
) -> Callable[[Any], Any]:
    """Return a function that returns the attribute `name` of objects like `sample`."""
    if isinstance(sample, types.ModuleType):
        place = sample.__name__
    else:
        kind = sample if isinstance(sample, type) else type(sample)
        place = f"{kind.__module__}.{kind.__qualname__}"
    path = f"{place}.{name}"
    try:
        lookup(sample, name, path)
    except AttributeError:
        found: Callable[[Any], Any] = _missing(path, purpose, public_way, needed=True)
        return found
    _note(path, purpose, public_way, needed=True)
    return operator.attrgetter(name)


def when_called(owner: str, name: str, purpose: str, *, needed: bool = False) -> Callable[[], Any]:
    """Return a function that returns a private name of a module, which takes long to import.

    The function raises a VersionError if the name is missing: a trainer can be built, but what
    calls the function fails. `needed` says whether every training calls the function; for the
    others see `private`.
    """
    path = f"{owner}.{name}"
    _note(path, purpose, None, needed)

    def find() -> Any:
        try:
            return lookup(pkgutil.resolve_name(owner), name, path)
        except (ImportError, AttributeError):
            raise _error(f"{path} (to {purpose})") from None

    return find


def lookup(owner: object, name: str, path: str) -> Any:
    """Return an attribute; tests replace this, to take away what stands at `path`."""
    return getattr(owner, name)


def all_names() -> tuple[PrivateName, ...]:
    """Return the private names of all modules of this package."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")
    return tuple(_NAMES)


def missing_names() -> tuple[PrivateName, ...]:
    """Return the names that this version of torch lacks."""
    return tuple(one for one in all_names() if not one.is_there)


def refuse_missing() -> None:
    """Refuse to build a trainer where a needed name without a public way is missing."""
    gone = [one for one in missing_names() if one.needed and not one.has_public_way]
    if gone:
        raise _error(" and ".join(f"{one.path} (to {one.purpose})" for one in gone))


def _note(
    path: str,
    purpose: str,
    public_way: object,
    needed: bool,
    *,
    is_there: bool = True,
    in_recommended: bool = True,
) -> None:
    has_public_way = public_way is not None
    _NAMES.append(PrivateName(path, purpose, has_public_way, needed, is_there, in_recommended))


def _missing(
    path: str, purpose: str, public_way: Any, needed: bool, *, in_recommended: bool = True
) -> Any:
    """Note that a name is missing; return the public way, or a class that can't be used."""
    _note(path, purpose, public_way, needed, is_there=False, in_recommended=in_recommended)
    if public_way is not None:
        return public_way

    def refuse(*_: object, **__: object) -> NoReturn:
        raise _error(f"{path} (to {purpose})")

    return type("Missing", (), {"__new__": refuse})


def _error(what: str) -> VersionError:
    return VersionError(
        f"torch {torch.__version__} lacks what evenstep reads: {what}. Install torch "
        f"{RECOMMENDED_TORCH}, or a newer evenstep"
    )
