"""Overhead of a step: an empty model of one scalar parameter, V = 8, on 1 and 2 devices.

`"devices": 0` is a plain loop over the same shards without evenstep: forward, backward, and the
gradients that torch sums, divided and applied. `"inline": true` uses lanes without threads.
"""

from __future__ import annotations

import ast
import inspect
import io
import statistics
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import evenstep
from benchmark import ROOT, Benchmark, column, cpus, script
from evenstep.bench.tables import NOTHING, Table, cells, verdict
from evenstep.bench.workload import each_ms
from evenstep.engine import InlineLanes, ThreadLanes

PACKAGE = Path(evenstep.__file__).parent
_ASIDE = {"cli", "bench", "book", "d2l.py", "mxnet", "reproduce"}
_OF_OTHERS = {*dir(torch.Tensor), *vars(nn.Module()), *dir(DataLoader)}
_OF_OTHERS |= {"_make", "_replace", "_iterator"}
_NO_CODE = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


class Scalar(nn.Module):
    """Multiplies (n,) by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """Return median and percentiles of the milliseconds of a step."""
    model, batch = Scalar(), torch.zeros(job["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = job["steps"], job["warmup_steps"]
    if job["devices"] == 0:
        torch.set_num_threads(1)
        times_ms = each_ms(lambda: _plain_step(model, optimizer, batch), *counts)
    else:
        layout = evenstep.Layout(lanes=InlineLanes if job["inline"] else ThreadLanes)
        options = {"devices": cpus(job["devices"]), "shards": job["shards"], "layout": layout}
        with evenstep.Trainer(model, optimizer, objective=_objective, **options) as trainer:
            times_ms = each_ms(lambda: trainer.step(batch), *counts)
    tenth, *_, ninetieth = statistics.quantiles(times_ms, n=10)
    return {"median_ms": statistics.median(times_ms), "tenth_ms": tenth, "ninetieth_ms": ninetieth}


def _objective(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).sum(), len(x)


def _plain_step(model: Scalar, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    for x in batch.tensor_split(len(batch)):
        model(x).sum().backward()
    assert model.factor.grad is not None
    model.factor.grad.div_(len(batch))
    optimizer.step()
    optimizer.zero_grad()


def count_calls() -> dict[str, int]:
    """Count what one eager step (V = 8, one device, a small network) calls in all threads.

    Watched by Python's profiling hook: entries of functions of evenstep, with comprehensions and
    resumed generators; not those of torch, of the model or of Python's library. Of five steps, the
    one with the fewest calls: on a busy machine a step also looks whether its device still works.
    """
    package, calls = str(PACKAGE), Counter[CodeType]()

    def hook(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code] += 1

    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer, X, y = torch.optim.SGD(model.parameters()), torch.ones(16, 16), torch.arange(16) % 4
    threading.setprofile(hook)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=1) as trainer:
        threading.setprofile(None)
        for _ in range(5):
            trainer.step(X, y)
        counted = []
        for _ in range(5):
            calls.clear()
            sys.setprofile(hook)
            trainer.step(X, y)
            sys.setprofile(None)
            files = len({code.co_filename for code in calls})
            counted.append({"files": files, "functions": len(calls), "calls": calls.total()})
    return min(counted, key=lambda step: step["calls"])


def count_lines() -> dict[str, int]:
    """Count the lines of the library, those of them that are code, and those that measure it."""
    library = [file for file in PACKAGE.glob("*") if file.name not in _ASIDE]
    measuring = (PACKAGE / "bench", PACKAGE / "reproduce", ROOT / "benchmarks")
    return {
        "library": _lines_in(*library),
        "code": sum(map(_code_lines, _texts_in(*library))),
        "measuring": _lines_in(*measuring),
        "tests": _lines_in(ROOT / "tests"),
        "parameters": len(inspect.signature(evenstep.Trainer).parameters),
        "private": len([*private_reads()]),
    }


def _texts_in(*places: Path) -> Iterator[str]:
    """Yield the modules in folders, and those that are named."""
    for place in places:
        for file in place.rglob("*.py") if place.is_dir() else [place]:
            if file.suffix == ".py":
                yield file.read_text(encoding="utf-8")


def _lines_in(*places: Path) -> int:
    return sum(text.count("\n") for text in _texts_in(*places))


def private_reads() -> Iterator[str]:
    """Yield where a module reads `another._name`, a name that only other packages define."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")}
    defined: dict[str, set[Path]] = {}  # private names, and the folders that define them
    for file, tree in trees.items():
        for name in _private_names(tree):
            defined.setdefault(name, set()).add(file.parent)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and _is_private(node.attr)
                and node.attr not in _OF_OTHERS
                and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
                and file.parent not in defined.get(node.attr, {file.parent})
            ):
                yield f"{file.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}"


def _private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module gives to its objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and _is_private(node.name):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _code_lines(text: str) -> int:
    """Count the lines of a module that are no docstring, comment or empty line."""
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


TARGETS = {"1": 2.5, "2": 2.5}  # times the plain loop
LIBRARY = "lines of the library, without `cli`, `bench`, `book`, `mxnet`, `reproduce`"
COUNTED = {  # label, at version 0.1.0, target
    "files": ("files that one eager step passes through", 31, 15),
    "functions": ("its functions", 205, 120),
    "calls": ("its calls", 730, 324),
    "library": (LIBRARY, 13_000, 25_000),
    "code": ("those of them that are code", None, None),
    "tests": ("lines of the tests", None, 40_000),
    "parameters": ("parameters of `Trainer`", None, 18),
    "private": ("private names that are read from another package", None, 0),
    "measuring": ("lines that measure: `bench`, `reproduce`, `benchmarks`", 6_700, 4_500),
}
SETTINGS = {"shards": 8, "warmup_steps": 200, "steps": 3000}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of steps, and that of what a step calls."""
    rows, plain = [], column(BENCHMARK.contenders[0].runs(document), "median_ms")
    for one, runs in BENCHMARK.measured(document):
        steps = column(runs, "median_ms")
        ratios = [step / loop for step, loop in zip(steps, plain, strict=False)]
        judged = verdict(ratios, at_most=TARGETS.get(one.key), spell="{}×".format)
        rows.append([one.label, *cells(steps, "{:.3f}".format), *cells(ratios, unit="×"), *judged])
    head = ("step", "ms", "spread", "of the plain loop", "spread of it", "target", "verdict")
    found, counted = document.get("step", {}), []
    for name, (label, before, most) in COUNTED.items():
        if name in found:
            judged = verdict([found[name]], at_most=most, spell="{:,}".format)
            past = NOTHING if before is None else f"{before:,}"
            counted.append([label, past, f"{found[name]:,}", *judged])
    heads = ("counted", "version 0.1.0", "now", "target", "verdict")
    return {"steps": Table(head, rows), "calls": Table(heads, counted)}


BENCHMARK = Benchmark(
    name="step_overhead",
    settings=SETTINGS,
    fields=lambda: {"step": {**count_calls(), **count_lines()}},
    contenders=[
        script("overhead", key, {**SETTINGS, "devices": devices, "inline": inline}, label)
        for key, label, devices, inline in (
            ("plain", "plain loop over the shards", 0, False),
            ("1", "evenstep, 1 device", 1, False),
            ("2", "evenstep, 2 devices", 2, False),
            ("2.inline", "evenstep, 2 devices, their lanes in one thread", 2, True),
        )
    ],
    tables=tables,
)
