"""The recorded pictures of a terminal: what stands on it at the end, and what the pages show."""

# ruff: noqa: I001  (what puts the scripts on the path comes first)

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarking import BENCHMARKS

import terminal_pictures
from terminal_pictures import IMAGES, PICTURES, final_lines, picture

DOCS = BENCHMARKS.parent / "docs"


def test_what_was_erased_does_not_stand_on_the_terminal():
    written = "loading ...\r\x1b[Kone\r\n\x1b[?25lstep 1\r\ncpu:0\r\x1b[2K\x1b[1A\x1b[2Ktwo\r\n"
    assert final_lines(written) == ["one", "two"]


def test_colours_stay():
    assert final_lines("\x1b[1mbold\x1b[0m\r\n") == ["\x1b[1mbold\x1b[0m"]
    assert ">bold<" in picture("p", "c", ["\x1b[1mbold\x1b[0m plain"])


def texts(svg):
    """Return the lines of a picture, the command's first."""
    rows = {}
    for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        rows.setdefault(float(text.get("y")), []).append((float(text.get("x")), text.text))
    lines = ("".join(part for _, part in sorted(rows[y])) for y in sorted(rows))
    return [line.replace("\xa0", " ").rstrip() for line in lines]


@pytest.mark.slow
def test_a_command_is_recorded(tmp_path):
    lines = final_lines(terminal_pictures.run("evenstep train --model mlp --steps 1", tmp_path))
    plain = [terminal_pictures.COLOUR.sub("", line) for line in lines]
    assert plain[0].startswith("test accuracy  ")
    assert plain[-1].startswith("all ") or plain[-1].startswith("cpu:0 ")


@pytest.mark.parametrize("name", PICTURES)
def test_the_stored_pictures_are_those_of_the_commands_and_stand_in_a_page(name):
    svg = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert any(PICTURES[name] in line for line in texts(svg))
    assert not re.search(r"url\((?!#)|@import|<script", svg)
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    assert sum(f"images/{name}.svg" in page.read_text(encoding="utf-8") for page in pages) == 1


def test_the_stored_pictures_show_what_the_pages_say():
    identical, train, verify = (
        "\n".join(texts((IMAGES / f"{name}.svg").read_text(encoding="utf-8"))) for name in PICTURES
    )
    assert len(set(re.findall("[0-9a-f]{64}", identical))) == 1
    assert re.findall(r"^(\d) +[0-9a-f]{64}$", identical, re.MULTILINE) == ["1", "2", "3"]
    assert re.search(r"fingerprint +[0-9a-f]{64}\n", train)
    assert len(re.findall(r"^epoch \d/8 .*test accuracy 0\.\d{4}", train, re.MULTILINE)) == 8
    assert "not identical: 1 and 2 differ\n" in verify
    assert "first step    2 (counted from 0)\n" in verify


def test_the_model_of_the_picture_is_that_of_the_page():
    page = (DOCS / "debugging.md").read_text(encoding="utf-8")
    (noisy,) = terminal_pictures.PROGRAM.findall(page)
    assert "class NoisyPixels(nn.Module)" in noisy
