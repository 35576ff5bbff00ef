"""`train --trace` measures channels-last images where they could be faster; `explain` says so."""

import json

import pytest
from torch import nn

from commands import run
from evenstep.cli.options.training import ExperimentOptions
from evenstep.cli.traces.advice import findings
from evenstep.cli.training.image_format import time_image_formats
from evenstep.data import digits
from evenstep.models import lenet
from traces import HandTrace


def explained(contiguous, channels_last):
    trace = HandTrace("cpu:0").add([10, 10])
    trace.trace.facts["image_formats_ms"] = {
        "contiguous": contiguous,
        "channels_last": channels_last,
    }
    return {finding.cause: finding.text for finding in findings(trace.account)}


def test_a_faster_format_is_said_with_both_times():
    text = explained(71.4, 50.7)["format"]
    assert "took 50.7 ms instead of 71.4 ms" in text
    assert "memory_format='channels_last' (a different experiment)" in text


@pytest.mark.parametrize("channels_last", [69.0, 80.0])
def test_a_format_that_brings_nothing_gets_no_sentence(channels_last):
    assert "format" not in explained(71.4, channels_last)


@pytest.mark.parametrize("times", [(0.0, 1.0), (float("nan"), 1.0), (1.0, "x")])
def test_times_that_no_measurement_gives_are_refused(times):
    with pytest.raises(Exception, match="not a trace written by evenstep"):
        explained(*times)


def measured(factory, batch=None, **options):
    experiment = ExperimentOptions(model="lenet", shards=2, **options)
    return time_image_formats(experiment, factory, batch or digits(train=True)[:8], "cpu:0")


def test_both_formats_are_measured_on_the_model():
    formats_ms = measured(lenet)
    assert formats_ms.keys() == {"contiguous", "channels_last"}
    assert all(ms > 0 for ms in formats_ms.values())


class Unsafe(nn.Sequential):
    """Its gradients are wrong for channels-last images (oneDNN 6035)."""

    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 1, stride=2), nn.Flatten(), nn.LazyLinear(10))


class Views(nn.Sequential):
    """Fails with torch's "view size is not compatible" for channels-last images."""

    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3), nn.Linear(4 * 26 * 26, 10))

    def forward(self, X):
        X = self[0](X)
        return self[1](X.view(len(X), -1))


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), {}),  # no convolution
        (Unsafe, {}),  # can't be channels-last
        (Views, {}),  # nor can this
        (lenet, {"memory_format": "channels_last"}),  # chosen already
    ],
)
def test_nothing_is_measured_where_there_is_no_choice(factory, options):
    assert measured(factory, **options) is None


def test_a_trace_keeps_what_was_measured(tmp_path):
    trace = tmp_path / "run.trace"
    run("train", "--model", "lenet", "--steps", 2, "--batch-size", 8, "--trace", str(trace))
    formats_ms = json.loads(trace.read_text())["otherData"]["image_formats_ms"]
    printed = run("explain", str(trace), "--json").stdout
    assert json.loads(printed)["image_formats_ms"] == formats_ms
