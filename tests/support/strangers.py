"""Runs the programs of `examples/strangers` as they stand there, and as their diffs make them."""

import builtins
import contextlib
import functools
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import evenstep

FOLDER = Path(__file__).parents[2] / "examples" / "strangers"
HUNK = re.compile(r"^@@ -(?P<at>\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
PROGRESS = ": loss "  # in every line that a program prints at the end of an iteration


class Stopped(Exception):  # noqa: N818 - no error
    """The program is to end here."""


def diff_of(name):
    """Return the lines of a program's diff behind its two headers."""
    headers, lines = [], (FOLDER / name / "even.diff").read_text().splitlines()
    while not HUNK.match(lines[0]):
        headers.append(lines.pop(0))
    assert headers == ["--- plain.py", "+++ even.py"]
    return lines


def even_source(name):
    """Return what the diff makes of `plain.py`; what it takes for given must stand there."""
    plain, made, at = (FOLDER / name / "plain.py").read_text().splitlines(), [], 0
    for line in diff_of(name):
        if hunk := HUNK.match(line):
            made += plain[at : int(hunk["at"]) - 1]
            at = int(hunk["at"]) - 1
        elif line.startswith("+"):
            made.append(line[1:])
        else:
            assert plain[at] == line[1:], f"{name}, line {at + 1}"
            made += [plain[at]] * line.startswith(" ")
            at += 1
    return "\n".join(made + plain[at:]) + "\n"


def run(source, arguments=(), *, devices=1, shards=None, resume=None, save=None, until=None):
    """Run a program until it ends; return what it was at each line of its progress.

    Args:
        source: the program's file.
        arguments: its arguments.
        devices: those of the trainer that it makes.
        shards: instead of its own number; then its data come in the order of the loader alone.
        resume: a folder of checkpoints that the trainer is loaded from.
        save: (number, folder): the program is stopped behind so many lines, and saved there.
        until: the program is stopped after so many steps.

    Returns:
        for each such line (steps done, fingerprint, the line from the loss on).
    """
    made, lines = [], []

    def trainer(*given, **options):
        options["devices"] = devices
        if shards is not None:
            options["shards"] = shards
        make = functools.partial(TheirTrainer.load, resume) if resume else TheirTrainer
        made.append(make(*given, **options))
        if shards is not None:
            made[0].epoch = lambda loader, **_: iter(loader)
        return made[0]

    def told(*given, **_):
        line = " ".join(map(str, given))
        if PROGRESS not in line:
            return
        loss = line.split(PROGRESS)[1]
        lines.append((made[0].steps_done, made[0].fingerprint(), loss) if made else (0, "", loss))
        if save and len(lines) == save[0]:
            made[0].save(save[1])
            raise Stopped
        if until is not None and made[0].steps_done >= until:
            raise Stopped

    with (
        mock.patch.object(evenstep, "Trainer", trainer),
        mock.patch.object(builtins, "print", told),
        mock.patch.object(sys, "argv", [str(source), *map(str, arguments)]),
        contextlib.suppress(Stopped),
    ):
        runpy.run_path(str(source), run_name="__main__")
    for one in made:
        one.close()
    return lines


TheirTrainer = evenstep.Trainer  # the library's own, while a program gets another
