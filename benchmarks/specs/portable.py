"""Portable arithmetic beside torch's own: operations, and whole steps, on one thread.

Each round is a fresh process for each part, which times both in turns. An operation's figure is the
median of its turns; a step's is that of some steps, of two trainers that are open one after the
other.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import evenstep
from benchmark import Benchmark, script
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import Table, cells, median, verdict
from evenstep.bench.workload import each_ms
from evenstep.data import Loader, digits
from evenstep.models import lenet, resnet18
from evenstep.models.gpt import gpt

Call = Callable[[], object]
Pairs = Iterator[tuple[str, list[float]]]
"""The name of a case, and its seconds with torch's arithmetic and in portable arithmetic."""

BOTH: tuple[Any, ...] = ("torch", "portable")
SQUARES = (64, 128, 256, 512, 1024, 2048)
PRODUCTS = (*((n, n, n) for n in SQUARES), (1024, 128, 65), (32, 400, 120))
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


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds of each case of a part, or the accuracies."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if job["part"] == "accuracies":
        return {"accuracies": {one: [_accuracy(seed, one) for seed in SEEDS] for one in BOTH}}
    part, _ = PARTS[job["part"]]
    return {"seconds": dict(part())}


def _products() -> Pairs:
    for rows, depth, columns in PRODUCTS:
        a, b = torch.randn(rows, depth), torch.randn(depth, columns)
        yield f"{rows:,} × {depth} × {columns}", _both(lambda a=a, b=b: torch.mm(a, b))


def _convolutions() -> Pairs:
    for name, (examples, inputs, size, outputs, kernel, stride, padding) in CONVOLUTIONS.items():
        layer = nn.Conv2d(inputs, outputs, kernel, stride, padding)
        nn.init.normal_(layer.weight)
        x = torch.randn(examples, inputs, size, size, requires_grad=True)

        def run(x: torch.Tensor = x, layer: nn.Module = layer) -> None:
            y = layer(x)
            torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))

        yield name, _both(run)


def _functions() -> Pairs:
    x = torch.rand(1_000_000) * 4 + 0.1
    for name in FUNCTIONS:
        function = getattr(torch, name, None) or getattr(functional, name)
        yield name, _both(lambda function=function: function(x))


def _loops() -> Pairs:
    """Time a product that is portable in the plainest way, beside evenstep's."""
    a, b, c = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    addresses = [one.data_ptr() for one in (a, b, c)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loops.so"
        command = ["cc", "-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC", "-xc"]
        subprocess.run([*command, "-", "-o", path], input=LOOPS, text=True, check=True)
        loops = ctypes.CDLL(str(path)).multiply
        loops.argtypes = [ctypes.c_void_p] * 3
        yield "256 × 256 × 256", _both(lambda: loops(*addresses), lambda: torch.mm(a, b))


def _both(run: Call, portable: Call | None = None, turns: int = 15) -> list[float]:
    """Return the medians of turns with torch's arithmetic and portable ones, in seconds a call.

    `portable` is what is timed in portable arithmetic, if that is something else.
    """
    count, times = 1, []
    while timeit(run, number=count) < 0.01:
        count *= 2
    for _ in range(turns):
        plain = timeit(run, number=count)
        with evenstep.portable():
            times.append((plain, timeit(portable or run, number=count)))
    return [statistics.median(column) / count for column in zip(*times, strict=True)]


def _trainings() -> Pairs:
    for name, make, objective in (
        ("LeNet, 256 examples", lambda: (lenet(), _images(256)), _of_images),
        ("ResNet-18, 64 examples", lambda: (resnet18(), _images(64)), _of_images),
        ("GPT (nanoGPT's small), 32 × 64", _gpt, _of_tokens),
    ):
        times = []
        for arithmetic in BOTH:
            torch.manual_seed(0)
            model, batch = make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            experiment = evenstep.Experiment(shards=8, arithmetic=arithmetic)
            options: dict[str, Any] = {"objective": objective, "experiment": experiment}
            with evenstep.Trainer(model, optimizer, devices=1, **options) as trainer:
                # The first steps check the contract.
                step = each_ms(functools.partial(trainer.step, *batch), 7, 4)
            times.append(statistics.median(step) / 1e3)
        yield name, times


class HandWritten(nn.Module):
    """An LSTM whose steps are written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(16, 128), nn.Linear(32, 128)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = memory = x.new_zeros(len(x), 32)
        for step in range(x.shape[1]):
            gates = self.of_input(x[:, step]) + self.of_state(state)
            forget, add, show, new = gates.chunk(4, 1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(add) * torch.tanh(new)
            state = torch.sigmoid(show) * torch.tanh(memory)
        return self.head(state)


def _perceptron() -> nn.Module:
    layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


def _thin() -> nn.Module:
    layers = [layer for _ in range(200) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(16, 10))


SMALL: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "perceptron of 3 layers, 64 examples": (_perceptron, (64, 32), 1.3),
    "LeNet, 8 examples": (lenet, (8, 1, 28, 28), 1.3),
    "LSTM by hand, 20 steps, 64 examples": (HandWritten, (64, 20, 16), 1.3),
    "200 thin layers, 64 examples": (_thin, (64, 16), 1.3),
    "LeNet, 256 examples": (lenet, (256, 1, 28, 28), 1.05),
}
"""Networks, the shapes of their batches, and the most that V = 8 may cost, over V = 1."""


def _shards() -> Pairs:
    """Time steps with V = 1 and V = 8: in torch's arithmetic, then in portable arithmetic."""
    for name, (make, shape, _) in SMALL.items():
        times = []
        for arithmetic in BOTH:
            for shards in (1, 8):
                torch.manual_seed(0)
                model = make()
                batch = torch.randn(shape), torch.randint(10, shape[:1])
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                experiment = evenstep.Experiment(shards=shards, arithmetic=arithmetic)
                loss = nn.CrossEntropyLoss()
                with evenstep.Trainer(
                    model, optimizer, loss, experiment=experiment, devices=1
                ) as trainer:
                    step = each_ms(functools.partial(trainer.step, *batch), 31, 6)
                times.append(statistics.median(step) / 1e3)
        yield name, times


def _images(examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(examples, 1, 28, 28), torch.randint(10, (examples,))


def _gpt() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    model = gpt(layers=4, heads=4, width=128, context=64, dropout=0.0)
    tokens = torch.randint(65, (32, 65))
    return model, (tokens[:, :-1], tokens[:, 1:])


def _of_images(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return functional.cross_entropy(model(x), y, reduction="sum"), len(y)


def _of_tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    scores = model(x).flatten(0, 1)
    return functional.cross_entropy(scores, y.flatten(), reduction="sum"), y.numel()


def _accuracy(seed: int, arithmetic: Any) -> float:
    """Return LeNet's test accuracy on digits."""
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


PARTS: Mapping[str, tuple[Callable[[], Pairs], float]] = {
    "products": (_products, 0.95),
    "convolutions": (_convolutions, 0.9),
    "functions": (_functions, 0.9),
    "trainings": (_trainings, 0.9),
    "loops": (_loops, 10),
    "shards": (_shards, 0),
}
"""What times a part's cases, and the target: the speed over that of torch's arithmetic."""


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return a table for each part."""
    runs = document["runs"]
    found = {part: _table(part, select(runs, variant=part)) for part in PARTS if part != "shards"}
    found["shards"] = _table_of_shards(select(runs, variant="shards"))
    accurate = select(runs, variant="accuracies")[:1]  # each round gives the same
    rows = [[one, *cells(run["accuracies"][one])] for run in accurate for one in run["accuracies"]]
    return {**found, "accuracies": Table(("arithmetic", "test accuracy", "least to most"), rows)}


def _table(part: str, runs: Sequence[Run]) -> Table:
    rows, (_, target) = [], PARTS[part]
    for name in runs[0]["seconds"] if runs else ():
        plain, portable = ([1e3 * run["seconds"][name][side] for run in runs] for side in (0, 1))
        speeds = [one / other for one, other in zip(plain, portable, strict=True)]
        judged = verdict(speeds, at_least=target, spell="{}×".format)
        rows.append([name, median(plain), median(portable), *cells(speeds, unit="×"), *judged])
    head = ("case", "torch, ms", "portable, ms", "speed", "spread of it", "target", "verdict")
    return Table(head, rows)


def _table_of_shards(runs: Sequence[Run]) -> Table:
    rows = []
    for name in runs[0]["seconds"] if runs else ():
        ms = [[1e3 * run["seconds"][name][place] for run in runs] for place in range(4)]
        plain = [eight / one for one, eight in zip(*ms[:2], strict=True)]
        costs = [eight / one for one, eight in zip(*ms[2:], strict=True)]
        judged = verdict(costs, at_most=SMALL[name][2], spell="{}×".format)
        figures = (median(ms[2]), median(ms[3]), *cells(costs, unit="×"))
        rows.append([name, f"{median(plain)}×", *figures, *judged])
    head = ("network", "torch", "V = 1, ms", "V = 8, ms", "V = 8 over V = 1", "spread of it")
    return Table((*head, "target", "verdict"), rows)


BENCHMARK = Benchmark(
    name="portable",
    contenders=[script("portable", part, {"part": part}) for part in (*PARTS, "accuracies")],
    tables=tables,
)
