"""Finds the function that builds a model, given the model's name."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from evenstep import models
from evenstep.errors import EvenstepError, ModelError, text_of
from evenstep.limits import MODELS

BUILT_IN: dict[str, Callable[[], nn.Module]] = {name: getattr(models, name) for name in MODELS}
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def find_factory(name: str) -> Callable[[], nn.Module]:
    """Return the function that builds model `name`: a built-in one, or `package.module:factory`.

    Raises:
        ModelError: the model does not exist, or its module can't be imported.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        hint = f", such as {name.removesuffix('.py')}:Net" if name.endswith(".py") else ""
        raise ModelError(
            f"got model {name!r}: choose {', '.join(BUILT_IN)}, or write "
            f"package.module:factory{hint}"
        )
    if module_name.endswith(".py"):
        raise ModelError(
            f"got model {name!r}: leave out .py, and write "
            f"{module_name.removesuffix('.py').replace('/', '.')}:{attribute}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with blamed_on(lambda: f"the module {module_name} of the model {name}"):
        module = importlib.import_module(module_name)
    factory = getattr(module, attribute, None)
    if isinstance(factory, nn.Module):
        raise ModelError(
            f"{name} is a {type(factory).__name__} that was made already: give a function that "
            f"makes it, such as `def make(): return {type(factory).__name__}(...)`, as "
            f"{module_name}:make"
        )
    if not callable(factory):
        found = "nothing of that name" if factory is None else f"a {type(factory).__name__}"
        raise ModelError(
            f"{module_name} has no function {attribute} (found {found}): "
            f"name a model as package.module:factory, a function without arguments"
        )
    return lambda: _build(name, factory)


@contextlib.contextmanager
def blamed_on(what: Callable[[], str]) -> Iterator[None]:
    """Turn an exception of the user's code into a ModelError of one line that says where it was."""
    try:
        yield
    except EvenstepError:
        raise
    except Exception as error:
        lines = text_of(error).strip().splitlines() or ["(without a message)"]
        raise ModelError(
            f"{what()} failed{_place(error)} with {type(error).__name__}: {lines[0]}"
        ) from error


def blamed_on_model(name: str, when: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """Like `blamed_on`, for code that runs model `name`; built-in models are not blamed."""
    if name in BUILT_IN:
        return contextlib.nullcontext()
    return blamed_on(lambda: f"the model {name} {when()}")


def _build(name: str, factory: Callable[[], object]) -> nn.Module:
    with blamed_on(lambda: f"the factory of the model {name}"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the factory of the model {name} returned a {type(model).__name__}: "
            f"a torch.nn.Module is needed"
        )
    return model


def _place(error: Exception) -> str:
    """Return the innermost line of code outside torch, evenstep and Python's library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, "<", os.path.dirname(os.__file__))):
            return f" at {frame.filename}, line {frame.lineno},"
    return ""
