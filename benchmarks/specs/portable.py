"""Portable arithmetic beside torch's own: operations, and whole steps, on one thread.

Each round is a fresh process for each part, which times both in turns. An operation's figure is the
median of its turns; a step's is that of some steps, of two trainers that are open one after the
other.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import Contender, fresh
from evenstep.bench.rounds import select
from evenstep.bench.tables import Table, cells, verdict
from evenstep.data import Loader, digits
from evenstep.models import lenet, resnet18
from evenstep.models.gpt import gpt

Run = Callable[[], object]

SQUARES = (64, 128, 256, 512, 1024, 2048)
PRODUCTS = {
    **{f"{n} × {n} × {n}": (n, n, n) for n in SQUARES},
    "1,024 × 128 × 65": (1024, 128, 65),
    "32 × 400 × 120": (32, 400, 120),
}
CONVOLUTIONS = {
    "LeNet, first: 32 × 1 × 28², 5 × 5 to 6": (32, 1, 28, 6, 5, 1, 2),
    "LeNet, second: 32 × 6 × 14², 5 × 5 to 16": (32, 6, 14, 16, 5, 1, 0),
    "ResNet: 8 × 64 × 32², 3 × 3 to 64": (8, 64, 32, 64, 3, 1, 1),
    "ResNet: 8 × 128 × 16², 3 × 3 to 128": (8, 128, 16, 128, 3, 1, 1),
    "ResNet: 8 × 512 × 4², 3 × 3 to 512": (8, 512, 4, 512, 3, 1, 1),
    "ResNet: 8 × 64 × 32², 1 × 1 to 128, stride 2": (8, 64, 32, 128, 1, 2, 0),
}
FUNCTIONS = ("exp", "log", "tanh", "sigmoid", "erf", "gelu", "silu")
SEEDS, EPOCHS = range(5), 8
TRAININGS = ("LeNet, 256 examples", "ResNet-18, 64 examples", "GPT (nanoGPT's small), 32 × 64")
LOOPS = """
void multiply(const float *a, const float *b, float *c) {
  for (int i = 0; i < 256; i++)
    for (int j = 0; j < 256; j++) {
      float sum = 0;
      for (int k = 0; k < 256; k++)
        sum = __builtin_fmaf(a[i * 256 + k], b[k * 256 + j], sum);
      c[i * 256 + j] = sum;
    }
}
"""

TARGETS = {"products": 0.95, "convolutions": 0.9, "functions": 0.9, "trainings": 0.9, "loops": 10}


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds of each case of a part: with torch's arithmetic, and portable."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if job["part"] == "accuracies":
        return {"accuracies": _accuracies()}
    return {"seconds": _PARTS[job["part"]]()}


def _products() -> dict[str, list[float]]:
    found = {}
    for name, (rows, depth, columns) in PRODUCTS.items():
        a, b = torch.randn(rows, depth), torch.randn(depth, columns)
        found[name] = _both(lambda a=a, b=b: torch.mm(a, b))
    return found


def _convolutions() -> dict[str, list[float]]:
    found = {}
    for name, (examples, inputs, size, outputs, kernel, stride, padding) in CONVOLUTIONS.items():
        x = torch.randn(examples, inputs, size, size, requires_grad=True)
        weight = torch.randn(outputs, inputs, kernel, kernel, requires_grad=True)
        bias = torch.randn(outputs, requires_grad=True)

        def run(x=x, weight=weight, bias=bias, stride=stride, padding=padding) -> None:
            y = functional.conv2d(x, weight, bias, stride, padding)
            torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))

        found[name] = _both(run)
    return found


def _functions() -> dict[str, list[float]]:
    x = torch.rand(1_000_000) * 4 + 0.1
    of = {name: getattr(torch, name, None) or getattr(functional, name) for name in FUNCTIONS}
    return {name: _both(lambda function=function: function(x)) for name, function in of.items()}


def _trainings() -> dict[str, list[float]]:
    return {name: [_step_s(name, one) for one in ("torch", "portable")] for name in TRAININGS}


def _loops() -> dict[str, list[float]]:
    """Time a product that is portable in the plainest way, beside evenstep's."""
    a, b, c = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    addresses = [one.data_ptr() for one in (a, b, c)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loops.so"
        command = ["cc", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-xc"]
        subprocess.run([*command, "-", "-o", path], input=LOOPS, text=True, check=True)
        loops = ctypes.CDLL(str(path)).multiply
        loops.argtypes = [ctypes.c_void_p] * 3
        return {"256 × 256 × 256": _both(lambda: loops(*addresses), lambda: torch.mm(a, b))}


def _accuracies() -> dict[str, list[float]]:
    """Return the test accuracies of LeNet on digits, one for each seed, by arithmetic."""
    return {one: [_accuracy(seed, one) for seed in SEEDS] for one in ("torch", "portable")}


def _accuracy(seed: int, arithmetic: Any) -> float:
    torch.manual_seed(seed)
    model = lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = Loader(digits(), batch_size=64, seed=seed)
    experiment = evenstep.Experiment(seed=seed, arithmetic=arithmetic)
    loss = nn.CrossEntropyLoss()
    with evenstep.Trainer(model, optimizer, loss, experiment=experiment, devices=1) as trainer:
        for _ in range(EPOCHS):
            for batch in trainer.epoch(loader):
                trainer.step(*batch)
        metrics = {"accuracy": evenstep.metrics.accuracy}
        return trainer.evaluate(Loader(digits(train=False), batch_size=64), metrics)["accuracy"]


_PARTS = {
    "products": _products,
    "convolutions": _convolutions,
    "functions": _functions,
    "trainings": _trainings,
    "loops": _loops,
}


def _both(run: Run, portable: Run | None = None, turns: int = 15) -> list[float]:
    """Return the medians of turns with torch's arithmetic and portable ones, in seconds a call.

    Args:
        run: what is timed.
        portable: what is timed in portable arithmetic, if that is something else.
        turns: the number of turns of each.
    """
    count = 1
    while _seconds(run, count) < 0.01:
        count *= 2
    times = []
    for _ in range(turns):
        plain = _seconds(run, count)
        with evenstep.portable():
            times.append((plain, _seconds(portable or run, count)))
    return [statistics.median(column) / count for column in zip(*times, strict=True)]


def _seconds(run: Run, count: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(count):
        run()
    return time.perf_counter() - began


def _step_s(name: str, arithmetic: Any) -> float:
    model, batch, objective = _training(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    experiment = evenstep.Experiment(shards=8, arithmetic=arithmetic)
    with evenstep.Trainer(
        model, optimizer, objective=objective, experiment=experiment, devices=1
    ) as trainer:
        for _ in range(4):  # the first steps check the contract
            trainer.step(*batch)
        return statistics.median(_seconds(lambda: trainer.step(*batch)) for _ in range(7))


def _training(name: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    torch.manual_seed(0)
    if name.startswith("GPT"):
        model: nn.Module = gpt(layers=4, heads=4, width=128, context=64, dropout=0.0)
        tokens = torch.randint(65, (32, 65))
        return model, (tokens[:, :-1], tokens[:, 1:]), _of_tokens
    examples, model = (256, lenet()) if name.startswith("LeNet") else (64, resnet18())
    batch = (torch.randn(examples, 1, 28, 28), torch.randint(10, (examples,)))
    return model, batch, _of_images


def _of_images(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return functional.cross_entropy(model(x), y, reduction="sum"), len(y)


def _of_tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    scores = model(x).flatten(0, 1)
    return functional.cross_entropy(scores, y.flatten(), reduction="sum"), y.numel()


def _contender(part: str) -> Contender:
    return script("portable", part, {"part": part})


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return a table for each part."""
    runs = document["runs"]
    found = {part: _table(part, select(runs, variant=part)) for part in _PARTS}
    return {**found, "accuracies": _table_of_accuracies(select(runs, variant="accuracies"))}


def _table_of_accuracies(runs: Sequence[Mapping[str, Any]]) -> Table:
    of = runs[0]["accuracies"] if runs else {}  # each round gives the same
    rows = [[name, *cells(values)] for name, values in of.items()]
    return Table(("arithmetic", "test accuracy", "least to most"), rows)


def _table(part: str, runs: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for name in runs[0]["seconds"] if runs else ():
        plain, portable = ([run["seconds"][name][side] for run in runs] for side in (0, 1))
        speeds = [one / other for one, other in zip(plain, portable, strict=True)]
        judged = verdict(speeds, at_least=TARGETS[part], spell="{}×".format)
        rows.append(
            [
                name,
                *cells([1000 * value for value in plain])[:1],
                *cells([1000 * value for value in portable])[:1],
                *cells(speeds, unit="×"),
                *judged,
            ]
        )
    head = ("case", "torch, ms", "portable, ms", "speed", "spread of it", "target", "verdict")
    return Table(head, rows)


BENCHMARK = Benchmark(
    name="portable",
    contenders=[_contender(part) for part in (*_PARTS, "accuracies")],
    tables=tables,
)


if __name__ == "__main__":
    fresh.answer(measure)
