"""No change may move a bit: short runs give the results that were recorded.

Where nothing was recorded for this torch and processor, the layouts of each run are compared with
each other.
"""

import pytest
import runs
import torch
from where import environment, load

RECORDED = load().get(environment(), {})


def cases():
    """Yield every run on each layout; all but the last (two, if none is recorded) are slow."""
    for name, run in runs.RUNS.items():
        layouts = [layout for layout in run.layouts if layout not in run.slow]
        quick = layouts[-1:] if name in RECORDED else layouts[-2:]
        for layout in run.layouts:
            marks = [pytest.mark.slow] if layout not in quick else []
            yield pytest.param(name, layout, id=f"{name} [{layout}]", marks=marks)


@pytest.fixture(scope="module")
def expected():
    """Results by run: the recorded one, or that of the first layout computed here."""
    return dict(RECORDED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "layout"), [*cases()])
def test_the_result_is_the_recorded_one(name, layout, expected):
    run = runs.RUNS[name]
    result = run.train(**run.layouts[layout])
    assert result == expected.setdefault(name, result)


def test_where_results_belong_to_does_not_depend_on_threads():
    """It is read while tests are collected, with other threads than those of a test."""
    found = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.add(environment())
    assert found == {environment()}


def test_at_least_25_runs():
    assert len(runs.RUNS) >= 25
