"""The measurements of `evenstep reproduce --only mxnet` run, and return what its rows need."""

import importlib
import json

import pytest

from evenstep.reproduce import experiments
from evenstep.reproduce.experiments import jobs, measurements
from evenstep.reproduce.rows import read_findings
from mxnet_engine import own_engine  # noqa: F401 - used by every test

TINY = {
    "mxnet.queued": {"size": 8, "repeats": 2},
    "mxnet.add": {"operation": "add", "size": 8, "count": 4},
    "mxnet.mm": {"operation": "mm", "size": 8, "count": 4},
    "mxnet.together": {"size": 8, "count": 2},
    "mxnet.memory": {"examples": 4, "batches": 2},
    "mxnet.calls": {"calls": 3, "rounds": 2},
    "mxnet.lenet": {"batch_size": 4, "lr": 0.2, "steps": 1, "grows": False},
    "mxnet.resnet18": {"batch_size": 2, "lr": 0.1, "steps": 1, "grows": True},
}


def figures_of(key):
    """Return the names of the figures that the rows take from a measurement."""
    rows = [
        row for name, rows in read_findings().items() if name.startswith("mxnet.") for row in rows
    ]
    names = {name for row in rows for name in (row.figure, row.over) if name}
    return {name.split(":")[1] for name in names if name.split(":")[0] == key}


@pytest.mark.parametrize("measurement", measurements("mxnet", TINY), ids=lambda one: one.key)
def test_every_measurement_returns_what_the_rows_need(measurement):
    figures = importlib.import_module(measurement.module).measure(measurement.job)
    assert json.loads(json.dumps(figures)) == figures
    wanted = figures_of(measurement.key)
    assert wanted
    assert wanted <= figures.keys()


@pytest.mark.parametrize("size", ["quick", "full"])
def test_its_jobs_have_these_fields(size):
    assert {name: set(job) for name, job in TINY.items()} == {
        name: set(job) for name, job in jobs(size).items() if name.startswith("mxnet.")
    }
    (experiment,) = (one for one in experiments(size) if one.name == "mxnet")
    rounds = 1 if size == "quick" else 3
    assert len(experiment.parts) == rounds * len(measurements("mxnet", TINY))
