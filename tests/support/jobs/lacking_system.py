"""A first hour on a system that lacks what Linux has: prints fingerprints and complaints as JSON.

The arguments: the system ("linux", "win32", "darwin"), and a folder to work in.
"""

import contextlib
import importlib
import json
import os
import sys
import warnings
from pathlib import Path

import click.testing

sys.path.insert(0, str(Path(__file__).parents[1]))
from lacking import take_away

NEEDED = """jinja2 optree pooch rich.console rich.progress rich.table safetensors.torch
    torch._dynamo
    torch.distributed.elastic.multiprocessing torch.distributed.launcher.api torch.export
    torch.utils.data tqdm"""
for name in NEEDED.split():
    importlib.import_module(name)
with contextlib.suppress(ImportError):
    importlib.import_module("matplotlib.font_manager")
system, folder = sys.argv[1:]
os.chdir(folder)
take_away(system)
warnings.simplefilter("ignore", EncodingWarning)
warnings.filterwarnings("error", category=EncodingWarning, module="evenstep")

from evenstep.cli import main  # noqa: E402

if system == "win32":  # where no C part is compiled
    from evenstep.arithmetic import native

    native.LIBRARIES = Path("none")

SHORT = ("--model", "mlp", "--momentum", "0.9", "--devices", "2")


def said(*arguments):
    """Run a command; return its exit code and what it printed."""
    result = click.testing.CliRunner().invoke(main, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def trained(*arguments):
    code, output, errors = said("train", *arguments, "--json", "-")
    assert code == 0, errors
    return json.loads(output)["fingerprint"]


def readme(name):
    """Run the README's program, and return the last line, its fingerprint."""
    printed = []
    exec(Path(name).read_text(encoding="utf-8"), {"print": printed.append, "__name__": "program"})
    return printed[-1]


def results():
    yield "readme", readme("readme.py")
    yield "first", trained(*SHORT, "--epochs", 1, "--checkpoint-dir", "kept", "--trace", "a.trace")
    kept = ("--checkpoint-dir", "kept", "--resume")
    yield "resumed", trained(*SHORT[:-2], "--epochs", 2, "--devices", 3, *kept)
    yield "straight", trained(*SHORT, "--epochs", 2)
    for command in (
        ("verify", *SHORT[:-2], "--devices", "1,2", "--steps", 3),
        ("doctor",),
        ("devices",),
        ("explain", "a.trace", "--html", "page.html"),
    ):
        code, output, errors = said(*command)
        yield command[0], [code, output if command[0] == "devices" else "", errors]
    yield "portable", said("train", *SHORT, "--steps", 2, "--arithmetic", "portable")[::2]
    if system == "win32":
        yield "processes", said("train", *SHORT, "--steps", 2, "--processes", 2)[::2]
    if system != "linux":
        yield "bench", said("bench", "peers")[::2]
        yield "reproduce", said("reproduce", "--quick", "--only", "waiting")[::2]


if __name__ == "__main__":
    print(json.dumps(dict(results())))
