"""The page on comparisons: its program runs, and its commands give what it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.comparison import Cause

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


def block(language, number=0):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[number]


def test_the_program_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(block("python"), {})
    assert capsys.readouterr().out.startswith(Cause.WEIGHTS.value)


def test_the_first_sentences_of_the_page_are_those_of_the_program():
    for number, cause in enumerate((Cause.BATCH_NORM, Cause.SUM)):
        assert block("text", number).startswith(cause.value)


@pytest.mark.slow
def test_the_commands_of_the_page_give_what_it_shows(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line in block("bash").splitlines():
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line)],
            cwd=tmp_path, env={**os.environ, "PATH": places},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    numberless = re.compile(r"[\d.]+(?:e-\d+)?")
    shown = [numberless.sub("N", one) for one in block("text").splitlines()]
    assert [numberless.sub("N", one) for one in done.stdout.splitlines()] == shown
