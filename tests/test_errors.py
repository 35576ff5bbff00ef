"""The tree of errors that the module draws is the tree that it defines."""

import builtins
import inspect
import re

import pytest

from evenstep import errors

ENTRY = re.compile(r"^(?P<branches>(?:│   |    |├── |└── )*)(?P<name>\w+Error)\b(?P<rest>.*)$")


def drawn_tree():
    """Read the drawing: {name: (name of its parent, names it "also" is)}."""
    tree, path = {}, []
    for line in errors.__doc__.splitlines():
        if match := ENTRY.match(line.removeprefix("    ")):
            depth = len(match["branches"]) // 4
            assert depth <= len(path), line
            path[depth:] = [match["name"]]
            also = re.search(r"\(also an? (\w+)\)", match["rest"])
            tree[match["name"]] = (path[depth - 1] if depth else None, also and also[1])
    return tree


DEFINED = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def test_every_error_is_drawn_and_nothing_else():
    assert drawn_tree().keys() == DEFINED.keys()
    assert len(DEFINED) > 5


@pytest.mark.parametrize("name", DEFINED)
def test_an_error_is_where_it_is_drawn(name):
    parent, also = drawn_tree()[name]
    expected = [Exception if parent is None else DEFINED[parent]]
    if also:
        expected.append(getattr(builtins, also))
    assert list(DEFINED[name].__bases__) == expected


def test_callers_mistakes_are_value_errors_and_others_are_not():
    assert issubclass(errors.BatchError, ValueError)
    assert not issubclass(errors.SaveError, ValueError)
    assert not issubclass(errors.NonFiniteLossError, ValueError)
