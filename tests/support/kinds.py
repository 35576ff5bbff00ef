"""The programs of `examples/kinds`, and what their trainings come to."""

import importlib.util
from pathlib import Path

from evenstep.checkpoint.fingerprint import fingerprint

FOLDER = Path(__file__).parents[2] / "examples" / "kinds"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name):
    """Import a program as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(model, optimizers, losses):
    """Return the fingerprint with each optimizer, and the losses of all steps."""
    several = optimizers if isinstance(optimizers, tuple) else (optimizers,)
    return [[fingerprint(model, one) for one in several], losses]
