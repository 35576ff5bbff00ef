"""Run commands of the command line in the test's own process."""

import re

from click.testing import CliRunner

from evenstep.checkpoint.files import list_checkpoints
from evenstep.cli import main
from evenstep.cli.training.record import TrainRecord

MLP = ("--model", "mlp", "--momentum", "0.9")
EPOCH_STEPS = 6  # 1,438 digits in batches of 256


def run(*arguments, code=0):
    """Run a command; it must end with the exit code `code`, and on purpose."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def trained(*arguments):
    """Train, and return the record."""
    return TrainRecord.from_json(run("train", *arguments, "--json", "-").stdout)


def complaint(*arguments, code):
    """Return the one line that a failing command must print; beside it are only notes."""
    return the_line(run(*arguments, code=code).stderr)


def the_line(errors):
    assert "Traceback" not in errors
    lines = errors.splitlines()
    (ours,) = [line for line in lines if line.startswith("evenstep: ")]
    assert all(line == ours or line == "" or line.startswith("note: ") for line in lines)
    return ours


def steps_kept(folder="kept"):
    """Return the steps of the checkpoints in `folder`."""
    return [int(re.fullmatch(r"step-(\d+)", path.name)[1]) for path in list_checkpoints(folder)]
