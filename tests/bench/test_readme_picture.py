"""The README's picture: its curves are the book's, and those that were measured."""

# ruff: noqa: I001  (what puts the scripts on the path comes first)

import json
import xml.etree.ElementTree as ElementTree

from benchmarking import BENCHMARKS

import readme_picture
from evenstep.bench.pictures import BLUE, RED

BOOK = json.loads((BENCHMARKS / "results" / "book.json").read_text(encoding="utf-8"))["parts"]
IMAGE = BENCHMARKS.parent / "docs" / "images" / "readme_accuracies.svg"
EPOCHS = 4  # that the book prints


def curves(svg, colour):
    """Return the points of a colour's curve in each panel."""
    paths = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
    drawn = [path for path in paths if f"stroke: {colour}" in path.get("style", "")]
    points = [path.get("d").replace("M", "L").split("L")[1:] for path in drawn]
    return [[tuple(map(float, one.split())) for one in line] for line in points
            if len(line) == EPOCHS]  # fmt: skip


def heights(points):
    """Return how high each point lies above the first one, as a share of the last one's height."""
    first, last = points[0][1], points[-1][1]
    return [(y - first) / (last - first) for _, y in points]


def close(ones, others):
    return all(abs(one - other) < 1e-4 for one, other in zip(ones, others, strict=True))


def test_one_device_and_two_differ_in_the_book_and_coincide_as_measured():
    svg = readme_picture.draw(BOOK)
    (book_one, here_one), (book_two, here_two) = curves(svg, BLUE), curves(svg, RED)
    assert here_one == here_two
    assert book_one != book_two
    measured = enumerate(BOOK["lenet.book.1"]["accuracies"][:EPOCHS])
    assert close(heights(here_one), heights([*measured]))
    assert close(heights(book_two), heights([*enumerate((0.1, 0.69, 0.74, 0.74))]))


def test_trainings_that_differ_are_drawn_apart():
    other = {**BOOK["lenet.book.2"], "accuracies": [0.1, 0.2, 0.3, 0.4]}
    svg = readme_picture.draw({**BOOK, "lenet.book.2": other})
    assert curves(svg, BLUE)[1] != curves(svg, RED)[1]


def test_there_is_no_picture_without_both_trainings():
    assert readme_picture.draw({"lenet.book.1": BOOK["lenet.book.1"]}) is None


def test_the_stored_picture_has_the_curves_of_the_results():
    stored, drawn = IMAGE.read_text(encoding="utf-8"), readme_picture.draw(BOOK)
    for colour in (BLUE, RED):
        pairs = zip(curves(stored, colour), curves(drawn, colour), strict=True)
        assert all(close(heights(one), heights(other)) for one, other in pairs)
