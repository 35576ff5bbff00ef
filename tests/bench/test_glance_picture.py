"""The picture at the top of docs/benchmarks.md: winning and losing rows, as they were measured."""

# ruff: noqa: I001  (what puts the scripts on the path comes first)

from collections import defaultdict

import pytest

from benchmarking import BENCHMARKS

import glance_picture
from evenstep.bench.pictures import BLUE, RED

STORED = BENCHMARKS.parent / "docs" / "images" / "benchmarks_glance.svg"


def documents(ddp=(50, 200)):
    """Return results in which evenstep trains LeNet at 100 examples/s, and DDP at these speeds."""
    found = defaultdict(lambda: None)
    runs = {"lenet.evenstep.2.v8.n256": (100, 100), "lenet.ddp.2.contiguous": ddp}
    found["training_speed"] = {
        "runs": [
            {"contender": key, "round": number, "examples_per_s": speed}
            for key, speeds in runs.items()
            for number, speed in enumerate(speeds)
        ]
    }
    return found


def test_a_row_is_evensteps_speed_over_the_peers_within_each_round():
    assert [*glance_picture.compared(documents())] == [("LeNet: DDP", [2.0, 0.5])]


def test_time_over_a_peers_is_turned_into_speed():
    found = documents()
    steps = {"plain": 1.0, "1": 2.0, "2": 4.0}
    runs = [{"variant": key, "round": 0, "median_ms": ms} for key, ms in steps.items()]
    found["step_overhead"] = {"runs": runs}
    _, one, two = glance_picture.compared(found)
    assert one == ("a step of one parameter, 1 device: plain loop", [0.5])
    assert two == ("a step of one parameter, 2 devices: plain loop", [0.25])


@pytest.mark.parametrize(
    ("ddp", "colour", "other"), [((50, 60), BLUE, RED), ((150, 160), RED, BLUE)]
)
def test_a_losing_row_is_drawn_in_its_own_colour(ddp, colour, other):
    svg = glance_picture.draw(documents(ddp))
    assert colour in svg
    assert other not in svg


def test_the_page_shows_the_picture_first():
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.index(STORED.name) < page.index("## ")
