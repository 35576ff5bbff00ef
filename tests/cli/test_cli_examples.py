"""The examples of the commands' help, run: each prints the line that the help shows."""

import re
import shlex
import subprocess
import sys

import pytest

from evenstep.cli import main

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(len(sys.argv))
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FIRST = {
    ("explain",): ["train"],
    ("export",): ["train"],
    ("compare",): ["record"],
}
"""Commands whose example reads what the example of other commands has written."""
EXIT_CODES = {("compare",): 1}  # there is a cause
LIMIT_S = 900

MINUTES = pytest.mark.exhaustive, pytest.mark.timeout(LIMIT_S + 10)
CASES = [
    ("train",),
    ("verify",),
    ("record",),
    ("compare",),
    ("doctor",),
    ("devices",),
    ("explain",),
    ("export",),
    ("bench", "scaling"),
    pytest.param(("bench", "peers"), marks=MINUTES),
    ("bench", "shards"),
    ("reproduce",),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 10)]  # each imports torch


def found(path):
    """Return a command by its path."""
    command = main
    for name in path:
        command = command.commands[name]
    return command


def printed(line, folder, code=0):
    """Run a command line, and return what it prints, with one space between words."""
    _, *words = shlex.split(line)
    done = subprocess.run(
        [sys.executable, "-m", "evenstep", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def pattern(prints):
    """Return a pattern of a line where ... stands for anything."""
    return ".*".join(re.escape(" ".join(part.split())) for part in prints.split("..."))


@pytest.mark.parametrize("path", CASES, ids=" ".join)
def test_an_example_prints_the_line_that_the_help_shows(path, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    for name in FIRST.get(path, ()):
        printed(found([name]).example, tmp_path)
    if path == ("compare",):
        printed("evenstep record --out two.rec train.py other-seed", tmp_path)
    command = found(path)
    output = printed(command.example, tmp_path, EXIT_CODES.get(path, 0))
    assert re.search(pattern(command.prints), output)
