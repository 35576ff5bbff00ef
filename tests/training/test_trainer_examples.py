"""The examples in the docstrings of `Trainer`, run as they stand there.

The example of the class makes the model, the optimizer, the loss and the loader of the others.
"""

import ast
import inspect
import re
import signal
import textwrap

import pytest
import torch
from torch import nn

import evenstep

EXAMPLE = re.compile(
    r"^\n((?:    .*\n|\n(?=    ))+)", re.MULTILINE
)  # indented, after an empty line
COMPILING = ("hybridized",)


def example_of(documented):
    """Return the first indented block of a docstring; "" without one."""
    found = EXAMPLE.search(inspect.getdoc(documented) + "\n")
    return textwrap.dedent(found[1]).strip() if found else ""


def members():
    """Return the public methods and properties that `Trainer` itself defines, by name."""
    return {
        name: getattr(evenstep.Trainer, name)
        for name in vars(evenstep.Trainer)
        if not name.startswith("_")
    }


def marks(name):
    return [pytest.mark.slow] if name in COMPILING else []


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Yield what the examples use: the names of the class's example, an open trainer, a batch."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    torch.manual_seed(0)
    found = {"evenstep": evenstep, "torch": torch, "nn": nn, "signal": signal}
    exec(example_of(evenstep.Trainer).partition("with ")[0], found)
    arguments = found["model"], found["optimizer"], found["loss"]
    trainer = evenstep.Trainer(*arguments, devices=2)
    with trainer:
        X, y = next(iter(trainer.epoch(found["loader"])))
        trainer.save("runs/a")
        yield {**found, "trainer": trainer, "X": X, "y": y}
    signal.signal(signal.SIGTERM, before)


def run(code, names):
    """Run an example; one that opens a trainer of its own runs after the given one is closed."""
    given = names["trainer"]
    if re.search(r"\btrainer = |as trainer:", code):
        given.close()
    exec(compile(code, "<example>", "exec"), names)
    names["trainer"].close()


def used(code):
    """Return the attributes that an example reads."""
    return {node.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("name", [pytest.param(one, marks=marks(one)) for one in members()])
def test_the_example_of_a_member_uses_it_and_runs(name, names):
    code = example_of(members()[name])
    assert name in used(code)
    assert len(code.splitlines()) <= 7
    if name == "should_stop":
        names["trainer"].ask_to_stop()  # for the branch that it guards
    run(code, names)


def test_the_example_of_the_class_trains(names):
    run(example_of(evenstep.Trainer), names)
    assert names["trainer"].cursor.epoch == 1


def test_the_signal_of_the_example_asks_to_stop(names):
    exec(example_of(evenstep.Trainer.ask_to_stop), names)
    assert callable(signal.getsignal(signal.SIGTERM))  # or the signal would end the tests
    assert not names["trainer"].should_stop
    signal.raise_signal(signal.SIGTERM)
    assert names["trainer"].should_stop


def test_an_example_that_is_wrong_would_be_found(names):
    with pytest.raises(AttributeError):
        run("trainer.setp(X, y)", names)
