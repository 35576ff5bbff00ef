"""The commands of all pages have options that exist; the programs of the page on export run."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from evenstep.cli import main
from evenstep.collectives import tree_sum

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for kind, code in found if kind == language]


def commands(page):
    """Return the command lines of a page, without comments and what stands before `evenstep`."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    for line in lines:
        words = (
            shlex.split(line, comments=True) if "evenstep" in line and "bash -c" not in line else []
        )
        if "evenstep" in words:
            yield words[words.index("evenstep") + 1 :]


COMMANDS = sorted({tuple(words) for page in PAGES for words in commands(page)})


def asking_for_help(words):
    """Return a command line with --help, before a command that belongs to the user."""
    place = 1 if words[:1] == ("record",) else len(words)
    return [*words[:place], "--help", *words[place:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_read_in_a_quarter_of_an_hour(page):
    assert len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8"))) <= 3000


def test_the_picture_of_shards_is_the_one_that_its_script_draws():
    script = runpy.run_path(str(ROOT / "docs" / "_site" / "shards_picture.py"))
    picture = ROOT / "docs" / "images" / "shards.svg"
    assert picture.read_text(encoding="utf-8") == "\n".join(script["drawn"]()) + "\n"
    spans = []
    tree_sum([(n, n + 1) for n in range(8)], lambda a, b: spans.append((a[0], b[1])) or spans[-1])
    assert sorted(script["nodes_of"](0, 8)) == sorted(spans)


def test_there_are_commands():
    assert len(COMMANDS) >= 15


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_of_a_command_exists(words):
    result = CliRunner().invoke(main, asking_for_help(words))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Usage: ")


def test_an_option_that_does_not_exist_would_be_found():
    assert CliRunner().invoke(main, ["train", "--devcies", "2", "--help"]).exit_code != 0


@pytest.mark.slow  # the compilers
@pytest.mark.timeout(310)
def test_the_page_on_export_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    code = "\n".join(blocks(ROOT / "docs" / "export.md", "python"))
    exec(compile(code, "<export.md>", "exec"), {"__name__": "export"})
