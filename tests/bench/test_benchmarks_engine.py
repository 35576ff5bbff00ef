"""The book's experiments with the engine: each runs, at tiny sizes, and has its table."""

# ruff: noqa: I001  (what puts the scripts on the path comes first)

import importlib
import json
import sys

import pytest
import torch

from benchmarking import BENCHMARKS, FACTS

import engine_experiments
import finding_rows
import fresh
import write_docs
from evenstep.book.reproduce.book import EXPERIMENTS, Finding
from evenstep.book.reproduce.engine.common import BareThreads
from evenstep.book.reproduce.findings import measured
from evenstep.book.reproduce.lineup import BOOK, TINY, lineup
from pages import engine as page
from evenstep.bench import machine
from evenstep.bench.rounds import Summary

GAIN = Finding(text="gain", figure="a:s", over="b:s", unit="×", book=4.0, at_least=2.0)


@pytest.fixture
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("measurement", lineup(TINY), ids=lambda one: one.key)
def test_every_measurement_runs_and_returns_what_the_tables_need(measurement):
    figures = importlib.import_module(measurement.module).measure(measurement.job)
    assert json.loads(json.dumps(figures)) == figures
    for name in (name for name in _figures() if name.startswith(f"{measurement.key}:")):
        assert isinstance(figures[name.split(":")[1]], float | int), name


def test_every_figure_of_the_tables_is_one_of_the_lineup():
    keys = {one.key for one in lineup(BOOK)}
    assert keys == {one.key for one in lineup(TINY)}
    assert {name.split(":")[0] for name in _figures()} == keys
    assert set(page.TOLD) == set(EXPERIMENTS)


def test_the_script_runs_in_fresh_processes_and_prints_the_book_beside_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "facts", lambda: FACTS)
    out = tmp_path / "engine_experiments.json"
    options = ["--rounds", "1", "--tiny", "--only", "queued", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "engine_experiments.py"), *options])
    engine_experiments.main()
    printed = capsys.readouterr().out
    assert "`submit` returned after       1.40 ms" in printed
    assert "waiting" not in printed
    assert [run["key"] for run in json.loads(out.read_text())["runs"]] == ["queued"]


def test_each_round_starts_with_another_measurement(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "facts", lambda: FACTS)
    monkeypatch.setattr(fresh, "run_module", lambda *_: {"submit_us": 1.0, "task_us": 2.0})
    out = tmp_path / "engine_experiments.json"
    options = ["--rounds", "2", "--only", "cost", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["engine_experiments.py", *options])
    engine_experiments.main()
    runs = json.loads(out.read_text())["runs"]
    assert [run["key"][len("cost.") :] for run in runs] == [
        *("engine", "chain", "pool"),
        *("chain", "pool", "engine"),
    ]
    assert "≤ 30.0 µs  reached" in capsys.readouterr().out


def test_only_chooses_by_the_beginning_of_keys():
    chosen = engine_experiments.chosen(lineup(TINY), "cost.pool,queued")
    assert [one.key for one in chosen] == ["queued", "cost.pool"]
    with pytest.raises(SystemExit, match="names no measurement"):
        engine_experiments.chosen(lineup(TINY), "elephant")


def test_a_ratio_is_taken_within_each_round_and_held_against_the_target():
    runs = [*_runs("a", 6.0, 30.0, 9.0), *_runs("b", 3.0, 3.0, 3.0)]
    assert measured(GAIN, runs) == Summary(3.0, 2.0, 10.0, 3)
    assert finding_rows.row(GAIN, runs) == [
        *("gain", "4.00×", "3.00×", "2.00 to 10.0", "0.750", "≥ 2.00×", "reached")
    ]
    worse = [*_runs("a", 5.0), *_runs("b", 3.0)]
    assert finding_rows.row(GAIN, worse)[-1] == "**not reached**"
    assert finding_rows.row(GAIN, _runs("a", 1.0))[2:] == ["–", "–", "–", "≥ 2.00×", "not measured"]


def test_a_target_from_above_and_a_row_without_one():
    most = Finding(text="cost", figure="a:s", scale=1e6, unit="µs", at_most=30.0)
    assert finding_rows.row(most, _runs("a", 29e-6))[-2:] == ["≤ 30.0 µs", "reached"]
    assert finding_rows.row(most, _runs("a", 31e-6))[-1] == "**not reached**"
    told = Finding(text="told", figure="a:s", unit="s")
    assert finding_rows.row(told, _runs("a", 0.5)) == [
        *("told", "–", "0.500 s", "0.500 to 0.500", "–", "–", "–")
    ]


def test_the_page_has_a_table_for_each_experiment_from_the_file_alone(tmp_path):
    (tmp_path / "engine_experiments.json").write_text(json.dumps(_document()))
    written = write_docs.page(tmp_path, {"engine.cost": "A word on cost.", "engine": "A word."})
    assert written.count("### ") == len(EXPERIMENTS) == written.count("| the book | here |")
    for row in (
        "| the first over the second | 0.396% | 50.0% | 50.0 to 50.0 | 126 | ≤ 1.00% | **not",
        "| gain | 2.09× | 2.00× | 2.00 to 2.00 | 0.958 | ≥ 1.09× | reached |",
        "| growth, no bound: peak | – | 8.00 MiB | 8.00 to 8.00 | – | – | – |",
        "| a task, from `submit` to the end of all | – | – | – | – | ≤ 30.0 µs | not measured |",
    ):
        assert row in written
    assert "1,000 × `y = x + 1`, x of 2000 × 2000." in written
    assert "10 products of 2000 × 2000 and 2000 × 2000 on `cpu:0`, copied" in written
    assert "A word on cost." in written
    assert "Rounds: 1." in written


def test_bare_threads_pass_errors_on_and_end():
    with BareThreads() as threads:
        threads.start(0, lambda: None)
        threads.start(1, lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            threads.wait()


def _figures():
    rows = [row for rows in EXPERIMENTS.values() for row in rows]
    return {name for row in rows for name in (row.figure, row.over) if name}


def _runs(key, *figures):
    return [{"round": number, "key": key, "s": figure} for number, figure in enumerate(figures)]


def _document():
    mib = 2**20
    figures = {
        "queued": {"queued_s": 1.0, "finished_s": 2.0},
        "waiting.add.engine.each": {"seconds": 6.0},
        "waiting.add.engine.end": {"seconds": 3.0},
        "memory.front.none": {
            "peak_growth_bytes": 8 * mib,
            "end_growth_bytes": 4 * mib,
            "made_s": 1.0,
        },
    }
    return {
        "command": "python benchmarks/engine_experiments.py",
        "machine": FACTS,
        "settings": BOOK,
        "runs": [{"round": 0, "key": key, **more} for key, more in figures.items()],
    }
