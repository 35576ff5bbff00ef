"""Where golden results belong to: the versions and the processor that decide a result's bits."""

import json
import platform
from pathlib import Path

import torch

GOLDEN = Path(__file__).with_name("golden.json")


def environment():
    """Name what decides bits here: torch's version, the processor, and its instruction set."""
    return f"torch {torch.__version__}, {_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def load():
    """Return the recorded results: by environment, then by the name of the run."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    names = ("vendor_id", "cpu family", "model", "model name")
    return " ".join(
        value.strip() for key, value in ((k.strip(), v) for k, v in facts.items()) if key in names
    )
