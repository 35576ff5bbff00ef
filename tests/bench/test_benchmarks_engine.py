"""The book's experiments with the engine: each runs, at tiny sizes, and has its table."""

# ruff: noqa: I001  (what puts the scripts on the path comes first)

import dataclasses
import importlib
import json
import re
import sys

import pytest

from benchmarking import BENCHMARKS, FACTS

import measure
from evenstep.bench import fresh, machine
from evenstep.reproduce.measures import DEVICES, OnThreads
from evenstep.reproduce.rows import Finding
from specs import engine

GAIN = Finding(text="gain", figure="a:s", over="b:s", unit="×", book=4.0, at_least=2.0)
TINY = {
    "queued": {"size": 8, "repeats": 2},
    "waiting.add": {"operation": "add", "size": 8, "count": 4},
    "waiting.mm": {"operation": "mm", "size": 8, "count": 4},
    "together": {"size": 8, "count": 2},
    "copies.square": {"size": 8, "inner": 8, "count": 2, "repeats": 1},
    "copies.thin": {"size": 8, "inner": 2, "count": 2, "repeats": 2},
    "memory": {"examples": 4, "batches": 3},
    "cost": {"tasks": 40},
}
TINY_ENGINE = dataclasses.replace(
    engine.BENCHMARK, settings=TINY, contenders=engine.contenders(TINY)
)


@pytest.mark.parametrize("measurement", engine.contenders(TINY), ids=lambda one: one.key)
def test_every_measurement_runs_and_returns_what_the_tables_need(measurement):
    figures = importlib.import_module(measurement.module).measure(measurement.job)
    assert json.loads(json.dumps(figures)) == figures
    for name in (name for name in _figures() if name.startswith(f"{measurement.key}:")):
        assert isinstance(figures[name.split(":")[1]], float | int), name


def test_every_figure_of_the_tables_is_one_of_the_lineup():
    keys = {one.key for one in engine.contenders(engine.JOBS)}
    assert keys == {one.key for one in engine.contenders(TINY)}
    assert {name.split(":")[0] for name in _figures()} == keys


@pytest.mark.slow
def test_the_script_runs_in_fresh_processes_and_prints_the_book_beside_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "facts", lambda: FACTS)
    out = tmp_path / "engine_experiments.json"
    options = ["engine_experiments", "--rounds", "1", "--only", "queued", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "measure.py"), *options])
    monkeypatch.setitem(measure.BENCHMARKS, "engine_experiments", TINY_ENGINE)
    measure.main()
    printed = capsys.readouterr().out
    assert re.search(r"`submit` returned after +1\.40 ms", printed)
    assert "waiting" not in printed
    assert [run["key"] for run in json.loads(out.read_text())["runs"]] == ["queued"]


def test_each_round_starts_with_another_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "facts", lambda: FACTS)
    figures = {"submit_us": 1.0, "task_us": 2.0}
    monkeypatch.setattr(fresh, "run_module", lambda *_, **__: figures)
    out = tmp_path / "engine_experiments.json"
    options = ["engine_experiments", "--rounds", "2", "--only", "cost", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["measure.py", *options])
    measure.main()
    runs = json.loads(out.read_text())["runs"]
    assert [run["key"][len("cost.") :] for run in runs] == [
        *("engine", "chain", "pool"),
        *("chain", "pool", "engine"),
    ]
    assert "≤ 30.0 µs  reached" in capsys.readouterr().out


def test_a_ratio_is_taken_within_each_round_and_compared_with_the_target():
    runs = [*_runs("a", 6.0, 30.0, 9.0), *_runs("b", 3.0, 3.0, 3.0)]
    assert GAIN.values(runs) == [2.0, 10.0, 3.0]
    assert engine.row(GAIN, runs) == [
        *("gain", "4.00×", "3.00×", "2.00 to 10.0", "0.750", "≥ 2.00×", "reached")
    ]
    worse = [*_runs("a", 5.0), *_runs("b", 3.0)]
    assert engine.row(GAIN, worse)[-1] == "**not reached**"
    assert engine.row(GAIN, _runs("a", 1.0))[2:] == ["–", "–", "–", "≥ 2.00×", "not measured"]


def test_an_upper_target_and_a_row_without_a_target():
    most = Finding(text="cost", figure="a:s", scale=1e6, unit="µs", at_most=30.0)
    assert engine.row(most, _runs("a", 29e-6))[-2:] == ["≤ 30.0 µs", "reached"]
    assert engine.row(most, _runs("a", 31e-6))[-1] == "**not reached**"
    bare = Finding(text="bare", figure="a:s", unit="s")
    assert engine.row(bare, _runs("a", 0.5)) == [
        *("bare", "–", "0.500 s", "0.500 to 0.500", "–", "–", "–")
    ]


def test_bare_threads_pass_errors_on_and_end():
    with OnThreads() as threads:
        assert threads.submit(max, 1, 2, device=DEVICES[0]).result() == 2
        threads.submit(lambda: 1 // 0, device=DEVICES[1])
        with pytest.raises(ZeroDivisionError):
            threads.waitall()


def _figures():
    rows = [row for rows in engine.FINDINGS.values() for row in rows]
    return {name for row in rows for name in (row.figure, row.over) if name}


def _runs(key, *figures):
    return [{"round": number, "key": key, "s": figure} for number, figure in enumerate(figures)]
