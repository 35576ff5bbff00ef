"""Flips single bits in every kind of file that evenstep reads again, and reads the file.

A flip is refused if reading raises one of evenstep's errors, and harmless if what was read is the
same, bit for bit. Anything else is wrong: other content, another error, a time of many seconds.
"""

from __future__ import annotations

import gzip
import random
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evenstep
from benchmark import Benchmark, script
from evenstep.bench.tables import Table
from evenstep.cli.options.training import ExperimentOptions
from evenstep.cli.training.runfile import read_run_file, write_run_file
from evenstep.data.idx import gunzip_idx, parse_idx
from evenstep.errors import EvenstepError

FLIPS, LONG_S = 100, 10.0
ENDS = ("refused", "harmless", "wrong")


def _network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    return model, torch.optim.Adam(model.parameters())


def _write_checkpoint(folder: Path) -> Path:
    with evenstep.Trainer(*_network(), nn.CrossEntropyLoss(), devices=1) as trainer:
        trainer.step(torch.ones(16, 4), torch.arange(16) % 3)
        return trainer.save(folder)


def _read_checkpoint(file: Path) -> object:
    trainer = evenstep.Trainer.load(file.parent, *_network(), nn.CrossEntropyLoss(), devices=1)
    return trainer.fingerprint(), trainer.cursor, trainer.steps_done, trainer.experiment


def _write_export(folder: Path) -> Path:
    return evenstep.export(_network()[0], torch.ones(2, 4), folder / "model.pt2")


def _read_export(file: Path) -> object:
    output: torch.Tensor = evenstep.load_exported(file)(torch.ones(2, 4))
    return output.numpy().tobytes()


def _write_images(folder: Path) -> Path:
    file, pixels = folder / "images.gz", bytes(number % 256 for number in range(3 * 28 * 28))
    file.write_bytes(gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 3, 28, 28) + pixels))
    return file


def _read_images(file: Path) -> object:
    return parse_idx(gunzip_idx(file.read_bytes(), "images", 3), "images", 3).tobytes()


def _write_run_file(folder: Path) -> Path:
    write_run_file(folder, ExperimentOptions())
    return next(folder.iterdir())


KINDS: dict[str, tuple[str, Callable[[Path], Path], Callable[[Path], object]]] = {
    "tensors": (
        "checkpoint: the tensors",
        lambda folder: _write_checkpoint(folder) / "tensors.safetensors",
        _read_checkpoint,
    ),
    "manifest": (
        "checkpoint: the manifest",
        lambda folder: _write_checkpoint(folder) / "manifest.json",
        _read_checkpoint,
    ),
    "run_file": (
        "the options beside the checkpoints of `evenstep train`",
        _write_run_file,
        lambda file: read_run_file(file.parent),
    ),
    "export": ("an exported model", _write_export, _read_export),
    "images": ("images of a data set (gzip, IDX)", _write_images, _read_images),
}
"""Of each kind of file: its name, what writes one into a folder, and what reads it."""


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Flip bits of one kind of file; return how many flips ended how, and the first wrong ones."""
    _, write, read = KINDS[job["kind"]]
    ends, wrong = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as place:
        file = write(Path(place))
        content, expected = file.read_bytes(), read(file)
        for _ in range(job["flips"]):
            bit = random.randrange(8 * len(content))
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            end = _end(lambda: read(file) == expected)
            ends[end.partition(":")[0]] += 1
            wrong += [f"bit {bit}: {end}"] if end.startswith("wrong") else []
    return {"ends": {end: ends[end] for end in ENDS}, "first": wrong[:3]}


def _end(read: Callable[[], bool]) -> str:
    began = time.monotonic()
    try:
        end = "harmless" if read() else "wrong: other content"
    except EvenstepError:
        end = "refused"
    except Exception as error:
        end = f"wrong: {type(error).__name__}"
    return end if time.monotonic() - began < LONG_S else "wrong: too long"


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of flips."""
    rows = []
    for one, runs in BENCHMARK.measured(document):
        ends = [sum(run["ends"][end] for run in runs) for end in ENDS]
        rows.append([one.label, str(sum(ends)), *map(str, ends)])
    return {"flips": Table(("file", "bits flipped", *ENDS), rows)}


BENCHMARK = Benchmark(
    name="flips",
    rounds=10,
    settings={"flips": FLIPS},
    contenders=[
        script("flips", kind, {"kind": kind, "flips": FLIPS}, label)
        for kind, (label, *_) in KINDS.items()
    ],
    tables=tables,
)
