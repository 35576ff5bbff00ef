"""The program `evenstep`: its commands, its exit codes, and one line for every error.

Exit codes: 0 done; 1 failed or not identical; 2 bad input; 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from typing import Any, NoReturn

import click

from evenstep.cli.commands import (
    bench,
    compare,
    devices,
    doctor,
    explain,
    export,
    plan,
    record,
    reproduce,
    train,
    verify,
)
from evenstep.cli.options.training import spell_options
from evenstep.cli.processes.hash_seed import fix_hash_seed
from evenstep.cli.processes.report import report_to_launcher
from evenstep.errors import EvenstepError, InputError, PeerError

COMMANDS = {
    "Train and check": (train, verify),
    "Why do two runs differ": (record, compare),
    "Look inside": (doctor, devices, explain),
    "Use a trained model": (export,),
    "Measure": (plan, bench, reproduce),
}
"""The commands, by their headings in the help."""


class Program(click.Group):
    """A group of commands that reports an error as one line on stderr, `evenstep: ...`."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command and exit."""
        if not args and "args" not in kwargs:
            fix_hash_seed()
        kwargs.setdefault("obj", dict(os.environ))  # as the user has set it, for the doctor
        # CUDA reads it when it starts; without it cuBLAS is not deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(0)
        except click.ClickException as error:
            _fail(_spell(error), error.exit_code)
        except click.Abort:
            _fail("stopped", 128 + signal.SIGINT)
        except EvenstepError as error:
            code = 2 if isinstance(error, InputError) else 1
            follows = isinstance(error, PeerError)
            reported = isinstance(error, PeerError) and error.reported
            _fail(spell_options(str(error)), code, follows=follows, reported=reported)
        except OSError as error:
            if not _came_from_output(error):
                raise
            _fail(_UNWRITTEN.format(error.strerror), 1)
        try:
            sys.stdout.flush()
        except OSError as error:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until Python ends)
            _fail(_UNWRITTEN.format(error.strerror), 1)
        sys.exit(code or 0)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings."""
        for heading, commands in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(one.name or "", one.get_short_help_str(90)) for one in commands]
                )


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(package_name="evenstep", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Train one PyTorch model on every device: the same weights, bit for bit, on any number."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _commands in COMMANDS.values():
    for _command in _commands:
        main.add_command(_command)


_UNWRITTEN = "the output can't be written ({})"


def _came_from_output(error: OSError) -> bool:
    """Whether an error was raised where a line is printed."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("click", "rich")


def _spell(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {context.command_path} --help)" if context else ""
    return in_plain_words(error.format_message()) + hint


def in_plain_words(message: str) -> str:
    """Return a message of click's without its names of types, and limits that are none."""
    for name, kind in (("integer", "an integer"), ("float", "a number")):
        message = message.replace(f"is not a valid {name} range", f"is not {kind}")
        message = message.replace(f"is not a valid {name}.", f"is not {kind}.")
    unlimited = re.fullmatch(r"(.* )(-?\d+) is not in the range (\d+)<=x<=(\d{19})\.", message)
    if unlimited is None or int(unlimited[2]) > int(unlimited[4]):
        return message
    return f"{unlimited[1]}{unlimited[2]} is less than {unlimited[3]}."


def _fail(message: str, code: int, *, follows: bool = False, reported: bool = False) -> NoReturn:
    """Print an error on one line and exit with `code`.

    Args:
        message: the error.
        code: the exit code.
        follows: whether the error follows from an error in another process.
        reported: whether that process reports its own error.
    """
    line = f"evenstep: {' '.join(message.split())}"
    if not report_to_launcher(line, code, follows=follows) and not reported:
        click.echo(line, err=True)
    sys.exit(code)
