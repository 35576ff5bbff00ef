"""The help and the completion of the command line: without torch, in groups, with values."""

import json
import os
import shlex
import subprocess
import sys
import time

import click
import pytest
from click.shell_completion import ShellComplete

from commands import run
from evenstep.bench.workload.kinds import TEXT
from evenstep.cli import main
from evenstep.cli.options.table import GroupedCommand
from evenstep.limits import BOOK_EXPERIMENTS, MODELS, TEXT_NETWORKS
from evenstep.models.registry import BUILT_IN
from evenstep.reproduce import experiments

HELP_S = 20  # far more than it takes on a busy machine; it took longer with torch
SLOW_TO_IMPORT = {"torch", "numpy", "optree", "rich", "jinja2", "evenstep.devices"}


def commands(group=main, path=()):
    """Yield the path of each command, such as ("bench", "peers"), and the command."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


COMMANDS = dict(commands())


def test_no_help_imports_torch():
    """Of the program and of all commands, in one process that prints what it has imported."""
    program = f"""
import json, sys
from click.testing import CliRunner
from evenstep.cli import main
runner = CliRunner()
for path in {[[], *map(list, COMMANDS)]}:
    result = runner.invoke(main, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(" ".join(["Usage:", "main", *path])), result.stdout
print(json.dumps(list(sys.modules)))
"""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - began_s < HELP_S
    assert not set(json.loads(done.stdout)) & SLOW_TO_IMPORT


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_one_heading_and_a_help_that_fits(path):
    assert run(*path, "--help").stdout.count("Usage: ") == 1
    line = COMMANDS[path].get_short_help_str(90)
    assert not line.endswith("...")
    assert COMMANDS[path].name == path[-1]


def test_the_programs_help_shows_every_command_once():
    lines = [line.split() for line in run("--help").stdout.splitlines()]
    shown = [words[0] for words in lines if words and words[0] in main.commands]
    assert sorted(shown) == sorted(main.commands)


@pytest.mark.parametrize("path", [(), ("bench",)])
def test_a_group_without_a_command_prints_its_help(path):
    assert run(*path).stdout == run(*path, "--help").stdout


@pytest.mark.parametrize("path", [(), *COMMANDS])
def test_h_is_short_for_help(path):
    assert run(*path, "-h").stdout == run(*path, "--help").stdout


def test_long_commands_say_how_long():
    output = " ".join(run("--help").stdout.split())
    for name, duration in (("train", "seconds"), ("bench", "minutes"), ("reproduce", "hours")):
        words = output.split(f" {name} ")[1].split(" ) ")[0]
        assert duration in words.partition(".")[0]


def headings(*path):
    """Return the options of each heading in the help of a command."""
    found, heading = {}, None
    for line in run(*path, "--help").stdout.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line.removesuffix(":")
        elif line.startswith("  -"):
            flag = next(word for word in line.split() if word.startswith("--"))
            found.setdefault(heading, []).append(flag)
    return found


def test_options_stand_under_headings():
    found = headings("train")
    assert found["Checkpoints"] == [
        *("--checkpoint-dir", "--checkpoint-every", "--resume", "--auto-resume")
    ]
    assert "--devices" in found["Devices and processes (the result does not depend on them)"]
    assert found["Options"] == ["--help"]
    assert len(found) == 7
    assert list(headings("verify"))[-2:] == ["What is compared", "Options"]


@pytest.mark.parametrize("path", COMMANDS)
def test_no_option_is_left_out_of_the_help(path):
    command = COMMANDS[path]
    flags = {one.opts[0] for one in command.params if isinstance(one, click.Option)}
    shown = [flag for group in headings(*path).values() for flag in group]
    assert sorted(shown) == sorted(flags | {"--help"}) or not isinstance(command, GroupedCommand)


GROUPED = [path for path, command in COMMANDS.items() if isinstance(command, GroupedCommand)]


def test_every_command_has_an_example_but_those_that_only_hold_others():
    assert {path for path in COMMANDS if path not in GROUPED} == {("bench",)}


@pytest.mark.parametrize("path", GROUPED)
def test_the_help_ends_with_an_example_of_the_command(path):
    *_, heading, example, prints = run(*path, "--help").stdout.splitlines()
    program, *words = shlex.split(example.removeprefix("  $ "))
    assert heading == "Example:"
    assert (program, *words[: len(path)]) == ("evenstep", *path)
    assert prints == f"  {COMMANDS[path].prints}"
    assert max(len(example), len(prints)) <= 80
    place = len(path)  # of --help, before the arguments
    assert run(*words[:place], "--help", *words[place:]).stdout.startswith("Usage: ")


def test_a_number_without_a_limit_shows_none():
    assert str(2**63 - 1) not in run("train", "--help").stdout
    assert "[1<=x]" in " ".join(run("train", "--help").stdout.split())


def test_the_names_in_the_help_are_those_that_exist():
    assert tuple(BUILT_IN) == MODELS
    assert tuple(TEXT) == TEXT_NETWORKS
    assert tuple(one.name for one in experiments("quick")) == BOOK_EXPERIMENTS


# --- completion, as a shell asks for it


def completed(*words):
    """Return what the shell is told for the last of these words, which is not finished."""
    shell = ShellComplete(main, {}, "evenstep", "_EVENSTEP_COMPLETE")
    *before, last = words
    return shell.get_completions(before, last)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ex",), ["explain", "export"]),
        (("train", "--model", "re"), ["resnet18"]),
        (("bench", "peers", "--model", "char"), ["chargpt", "chargpt-small"]),
        (("train", "--data", ""), ["digits", "fashion-mnist"]),
        (("train", "--precision", "b"), ["bf16"]),
        (("train", "--devices", "cpu:0,cpu"), ["cpu:0,cpu:1"]),
        (("reproduce", "--only", "lenet,res"), ["lenet,resnet18"]),
        (("train", "--checkpoint-"), ["--checkpoint-dir", "--checkpoint-every"]),
    ],
)
def test_values_are_completed(words, expected):
    assert [item.value for item in completed(*words)] == expected


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("train", "--json", "ru"), "file"),
        (("train", "--log-dir", "ru"), "dir"),
        (("train", "--data-dir", "ru"), "file"),
        (("explain", "ru"), "file"),
    ],
)
def test_names_of_files_are_left_to_the_shell(words, kind):
    assert [(item.type, item.value) for item in completed(*words)] == [(kind, "ru")]


def test_the_shell_gets_its_script():
    """As docs/start.md loads it."""
    environment = {**os.environ, "_EVENSTEP_COMPLETE": "zsh_source"}
    command = [sys.executable, "-c", "from evenstep.cli import main; main(prog_name='evenstep')"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("#compdef evenstep")
