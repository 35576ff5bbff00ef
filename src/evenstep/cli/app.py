"""The program `evenstep`: its commands, its exit codes, and its one line for every error.

Exit codes: 0 done, 1 failed, stopped or not identical, 2 bad input.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from evenstep.cli.bench import bench
from evenstep.cli.devices import devices
from evenstep.cli.explain import explain
from evenstep.cli.export import export
from evenstep.cli.launch import hand_to_launcher
from evenstep.cli.reproduce import reproduce
from evenstep.cli.train import train
from evenstep.cli.verify import verify
from evenstep.errors import EvenstepError, InputError, PeerError


class Program(click.Group):
    """A group of commands whose errors are one line on stderr that begins with `evenstep: `."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command that the arguments name, and exit."""
        # CUDA reads it once, when it starts; without it cuBLAS is not deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            _fail(_spell(error), error.exit_code)
        except click.Abort:
            _fail("stopped", 1)
        except EvenstepError as error:
            code = 2 if isinstance(error, InputError) else 1
            follows, told = isinstance(error, PeerError), getattr(error, "reported", False)
            _fail(str(error), code, follows=follows, told=told)
        sys.exit(code or 0)


@click.group(cls=Program, invoke_without_command=True)
@click.version_option(package_name="evenstep", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Train one PyTorch model on every device: the same weights, bit for bit, on any number."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (train, verify, explain, export, devices, bench, reproduce):
    main.add_command(_command)


def _spell(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" ({context.command_path} --help shows what is possible)" if context else ""
    return error.format_message() + hint


def _fail(message: str, code: int, *, follows: bool = False, told: bool = False) -> NoReturn:
    """Say what is wrong, and exit.

    Args:
        message: what is wrong.
        code: to exit with.
        follows: whether it follows from what is wrong in another process.
        told: whether that one says so itself.
    """
    line = f"evenstep: {' '.join(message.split())}"
    if not hand_to_launcher(line, code, follows=follows) and not told:
        click.echo(line, err=True)
    sys.exit(code)
