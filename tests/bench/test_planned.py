"""The rounds of `benchmarks/specs/planned.py`: what is kept, and what is published of them."""

# ruff: noqa: I001  (what puts the scripts on the path comes first)

import pytest

from benchmarking import FACTS

import benchmark
from evenstep.bench import Record, machine, run_rounds
from specs import planned

KEY = "two.lenet.v2"


def test_predictions_are_kept_before_the_runs_of_their_round(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "facts", lambda: FACTS)
    cases = [one for one in planned.BENCHMARK.contenders if one.key.startswith("two.lenet")]
    seen = []

    def predict(contenders):
        seen.append(("predicted", len(contenders)))
        yield from ({"case": one.key, "predicted": 1.0} for one in contenders)

    def measure(one):
        kept = benchmark.load("planned", tmp_path)["predictions"]
        seen.append((one.key, len(kept)))
        return {"measured": 2.0}

    record = Record("planned", "planned", tmp_path / "planned.json")
    run_rounds(cases, 2, record, measure=measure, predict=predict)
    assert [one for one in seen if one[0] == "predicted"] == [("predicted", 4)] * 2
    assert [count for key, count in seen if key != "predicted"] == [4] * 4 + [8] * 4
    kept = benchmark.load("planned", tmp_path)["predictions"]
    assert [one["round"] for one in kept] == [0] * 4 + [1] * 4


def rounds(key, *ratios):
    """Runs that measured 100 examples/s, each with a prediction of its own."""
    return [
        {"round": n, "case": key, "predicted": 100.0 * one, "measured": 100.0, "alone": 50.0}
        for n, one in enumerate(ratios)
    ]


def test_the_error_of_a_case_is_the_median_of_its_rounds():
    runs = rounds(KEY, 1.10, 0.97, 1.02, 1.30, 1.01) + rounds("two.lenet.v4", 0.90)
    tables = planned.tables({"runs": runs})
    first, second = tables["cases"].rows
    assert first[3:] == ["102", "100", "+2.0%", "-3.0% to +30.0%", "2.00"]
    assert second[5:7] == ["-10.0%", "one round"]
    assert tables["errors"].head[0] == "error of 2 cases, 1 to 5 rounds each"
    assert tables["errors"].rows[0][1] == "10.0%"  # the larger of 2% and 10%: of two, the upper


def test_each_round_is_predicted_anew(monkeypatch):
    counts = []

    def fresh(module, job, *more, **options):
        counts.append(module)
        raise RuntimeError("measured")

    monkeypatch.setattr(planned.fresh, "run_module", fresh)
    case = next(one for one in planned.BENCHMARK.contenders if one.key == KEY)
    planned.work_of.cache_clear()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="measured"):
            list(planned.predict_round([case]))
    assert len(counts) == 2
