"""What many kinds of training cost with evenstep: in lines, and in time on one device.

Each of `kinds.csv` is a program of `examples/kinds` that has its training twice: `plain`, in torch
alone, and `even`. A fresh process trains them in turns; an update's time is that between two
updates.
"""

from __future__ import annotations

import ast
import csv
import difflib
import functools
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmark import FOLDER, ROOT, Benchmark, script
from evenstep.bench.rounds import Run
from evenstep.bench.tables import NOT_MEASURED, NOTHING, Table, cells, median

PROGRAMS = ROOT / "examples" / "kinds"
SETTINGS = {"turns": 5, "steps": 66, "skipped": 34}  # skipped: the first steps, with the checks
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "v1": {"devices": ["cpu:0"], "shards": 1},
    "v8": {"devices": ["cpu:0"], "shards": 8},
}
with (FOLDER / "kinds.csv").open(newline="", encoding="utf-8") as file:
    KINDS = {row["program"]: row for row in csv.DictReader(file)}


def measure(job: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the milliseconds of an update in each turn, by way."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(PROGRAMS))
    program = importlib.import_module(job["kind"])
    took_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(job["turns"]):
        for way, options in WAYS.items():
            train = program.even if options else program.plain
            train = functools.partial(train, steps=job["steps"], **options)
            took_ms[way].append(_update_ms(job, train))
    return took_ms


def _update_ms(job: Mapping[str, Any], train: Callable[[], object]) -> float:
    """Return the mean time between two updates of a training, behind its first steps."""
    ended_s: list[float] = []
    hook = register_optimizer_step_post_hook(lambda *_: ended_s.append(time.perf_counter()))
    train()
    hook.remove()
    timed_s = ended_s[len(ended_s) * job["skipped"] // job["steps"] :]
    return 1e3 * (timed_s[-1] - timed_s[0]) / (len(timed_s) - 1)


def lines(kind: str) -> tuple[int, int]:
    """Return how many lines `even` adds to `plain` or changes, and how many it removes or changes.

    Counted are imports of evenstep, both functions, and what only one of them uses. Indentation and
    empty lines don't count.
    """
    source = (PROGRAMS / f"{kind}.py").read_text(encoding="utf-8")
    plain, even = (_own_lines(source, name) for name in ("plain", "even"))
    changes = [*difflib.unified_diff(plain, even, lineterm="", n=0)][2:]
    added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
    return added, removed


def _own_lines(source: str, name: str) -> list[str]:
    """Return the lines that a program would not have without the training `name`."""
    tree = ast.parse(source)
    defined = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    other = "plain" if name == "even" else "even"
    own = _used(defined, name) - _used(defined, other)
    found: list[str] = []
    for node in tree.body:
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_ours = is_import and name == "even" and "evenstep" in ast.unparse(node)
        if is_ours or getattr(node, "name", None) in own:
            text = ast.get_source_segment(source, node) or ""
            found += [line.strip() for line in text.splitlines() if line.strip()]
    return [line for line in found if not line.startswith(f"def {name}(")]


def _used(defined: Mapping[str, ast.FunctionDef], name: str) -> set[str]:
    """Return a function's name and those of the functions that it uses, directly or not."""
    found, new = set[str](), {name}
    while new:
        found |= new
        nodes = (node for one in new for node in ast.walk(defined[one]))
        words = {node.id for node in nodes if isinstance(node, ast.Name)}
        new = (words & defined.keys()) - found
    return found


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of kinds."""
    rows = []
    for one in BENCHMARK.contenders:
        kind, (added, removed) = KINDS[one.key], lines(one.key)
        link = f"[{kind['kind']}](../examples/kinds/{one.key}.py)"
        times = _times(one.runs(document))
        rows.append([link, kind["change"], str(added), str(removed), *times])
    head = ("kind", "what changes", "lines added or changed", "removed or changed")
    times = ("plain, ms an update", "V = 1", "spread", "V = 8", "spread of it")
    return {"kinds": Table((*head, *times), rows, 2)}


def _times(runs: list[Run]) -> list[str]:
    """Return the cells of an update's time, and of its multiples with evenstep, over all turns."""
    if not runs:
        return [*[NOTHING] * 4, NOT_MEASURED]
    plain, v1, v8 = ([took for run in runs for took in run[way]] for way in WAYS)
    found = [median(plain)]
    for took in (v1, v8):
        ratios = [ours / theirs for ours, theirs in zip(took, plain, strict=True)]
        found += cells(ratios, unit="×")
    return found


BENCHMARK = Benchmark(
    name="kinds",
    settings=SETTINGS,
    contenders=[
        script("kinds", name, {"kind": name, **SETTINGS}, kind["kind"], needs=kind["needs"] or None)
        for name, kind in KINDS.items()
    ],
    tables=tables,
    rounds=1,
)
