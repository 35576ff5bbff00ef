"""Groups of options: values that are checked when they are made, and never change."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from typing import TYPE_CHECKING

from evenstep.errors import InputError, hides_own_frames, shown

if TYPE_CHECKING:
    from typing_extensions import Self


class Options:
    """Base class of frozen dataclasses whose fields are options, each with a default.

    Attributes:
        given: the names of the fields that were given; the others have their defaults.
    """

    given: frozenset[str]

    @hides_own_frames
    def __new__(cls, **given: object) -> Self:
        """Note what is given: a default that is written down is a choice, too.

        Raises:
            InputError: names the field that was meant, which another group may have.
        """
        names = [one.name for one in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in given.keys() - {*names}:
            raise InputError(f"{cls.__name__} has no argument {name!r}{_meant(cls, name)}")
        self = super().__new__(cls)
        object.__setattr__(self, "given", frozenset(given))
        return self

    def __repr__(self) -> str:
        default = type(self)()
        fields = ((one.name, getattr(self, one.name)) for one in dataclasses.fields(self))  # type: ignore[arg-type]
        shown = [f"{k}={_spell(v)}" for k, v in fields if v != getattr(default, k)]
        return f"{type(self).__name__}({', '.join(shown)})"


def _meant(cls: type[Options], name: str) -> str:
    """Return which field of any group has nearly the name, as a question; else those of `cls`."""
    for group in (cls, *Options.__subclasses__()):
        names = [one.name for one in dataclasses.fields(group)]  # type: ignore[arg-type]
        for meant in difflib.get_close_matches(name, names, 1, 0.75):
            return f": did you mean evenstep.{group.__name__}({meant}=...)?"
    return f": it has {', '.join(one.name for one in dataclasses.fields(cls))}"  # type: ignore[arg-type]


def _spell(value: object) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def check_integer(name: str, value: object, *, at_least: int, at_most: int | None) -> None:
    """Refuse an argument that is no integer, or out of range."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < at_least or (at_most is not None and value > at_most):  # type: ignore[operator]
        wanted = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise InputError(f"got {name}={shown(value)}: give an integer {wanted}")


def check_seconds(name: str, value: object, *, at_most: float) -> None:
    """Refuse an argument that is no number of seconds, or out of range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= at_most:  # type: ignore[operator]
        limit = "" if at_most == math.inf else f", at most {at_most:,}"
        raise InputError(f"got {name}={shown(value)}: give a number of seconds above 0{limit}")


def check_positive(name: str, value: object) -> None:
    """Refuse an argument that is no finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise InputError(f"got {name}={shown(value)}: give a number above 0")


def check_flag(name: str, value: object) -> None:
    """Refuse an argument that is neither True nor False."""
    if not isinstance(value, bool):
        raise InputError(f"got {name}={shown(value)}: give True or False")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse an argument that is none of the choices."""
    if value not in choices:
        raise InputError(f"got {name}={shown(value)}: choose one of {', '.join(choices)}")
