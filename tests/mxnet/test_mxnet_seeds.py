"""The seeds' MXNet programs run from top to bottom; only their import lines are changed.

The tests need the seed documents, which are not a part of this repository. So that they take
seconds, `SHORTER` replaces numbers of epochs, calls and examples in the cells, and the data set is
cut to some batches.
"""

import ast
import contextlib
import functools
import itertools
import linecache
import os
import re
from pathlib import Path

import pytest

from evenstep import mxnet as mx
from evenstep.mxnet import d2l

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"

IMPORTS = [
    (r"\bfrom d2l import mxnet as d2l", "from evenstep.mxnet import d2l"),
    (r"^# import d2lzh as d2l", "from evenstep.mxnet import d2l"),  # its later cells use d2l
    (r"\bimport d2lzh as d2l", "from evenstep.mxnet import d2l"),
    (r"\bimport mxnet as mx", "import evenstep.mxnet as mx"),
    (r"\bfrom mxnet\b", "from evenstep.mxnet"),
]

SHORTER = [
    ("range(4)", "range(1)"),  # epochs
    ("num_epochs = d2l.Timer(), 10", "num_epochs = d2l.Timer(), 1"),
    ("num_batches, batch_size = 100, 1024", "num_batches, batch_size = 4, 64"),
    ("range(1000)", "range(50)"),  # calls
    ("shape=(6000, 6000)", "shape=(600, 600)"),
    ("shape=(2000, 2000)", "shape=(600, 600)"),
]
RESNET = [("batch_size=256, lr=0.1", "batch_size=8, lr=0.1"), ("batch_size=512", "batch_size=16")]

# Document 002 has lost its line breaks. For each line: its indent, and its number of words.
LINES_OF_002 = """
0:4 0:5 0:6 0:4 0:3 0:3 0:3 0:3 0:3 0:3 0:3 0:3 0:3 0:10 0:3 1:5 1:3 1:6 1:6 1:3 1:6 1:3 1:6 1:3
1:6 1:2 0:3 0:2 0:2 0:3 1:7 1:4 2:1 1:2 0:3 0:2 0:2 0:2 1:4 2:3 1:4 2:1 0:11 0:2 0:2 0:3 1:5 1:5
1:6 0:3 0:3 0:3 0:2 0:6 1:7 1:2 2:13 1:2 1:4 2:1 1:2 1:4 2:5 1:2 1:4 2:3 0:2 0:2 0:4 1:4 1:7 1:3
1:2 1:8 1:4 2:3 2:4 3:2 3:4 3:1 2:5 2:2 3:3 2:5 2:10 0:3
"""


def text_of(number):
    if not SEEDS.is_dir():
        pytest.skip("the seed documents are not beside this checkout (../shared/seeds)")
    (file,) = SEEDS.glob(f"{number}_*.txt")
    return file.read_text(encoding="utf-8")


def cell_of_002():
    text = text_of("002")
    words = iter(text[text.index("import mxnet as mx") :].split())
    lines = []
    for pair in LINES_OF_002.split():
        indent, count = map(int, pair.split(":"))
        lines.append("    " * indent + " ".join(itertools.islice(words, count)))
    assert not list(words)
    return ["\n".join(lines)]


def cells_of_003():
    """Return the cells after `In [n]:`, without what they print, and those between fences."""
    text = text_of("003")
    starts = re.finditer(r"^In \[\d+\]:\n|^```python\n", text, re.MULTILINE)
    cells = []
    for start in starts:
        rest = text[start.end() :]
        end = r"^```$" if start[0].startswith("`") else r"^In \[\d+\]:|^#+ \d|^```|^#####"
        found = re.search(end, rest, re.MULTILINE)
        cells.append(longest_program(rest[: found.start() if found else None].splitlines()))
    return cells


def longest_program(lines):
    """Return the first lines, as many as are Python; what a cell prints and explains is not."""
    for count in range(len(lines), 0, -1):
        program = "\n".join(lines[:count])
        with contextlib.suppress(SyntaxError):
            ast.parse(program)
            return program
    raise AssertionError(f"no Python in {lines[:3]}")


def cells_of_004():
    blocks = re.findall(
        r"^```\{\.python \.input\}\n(.*?)^```$", text_of("004"), re.MULTILINE | re.DOTALL
    )
    return [block for block in blocks if block.startswith("#@tab mxnet")]


CELLS = {
    "002": (cell_of_002, SHORTER),
    "003": (cells_of_003, SHORTER + RESNET),
    "004": (cells_of_004, SHORTER + RESNET),
}


def test_the_cells_of_003_are_all_found():
    cells = cells_of_003()
    assert len(cells) == 26 + text_of("003").count("```python\n")
    assert "def add(a, b)" in cells[1]
    assert cells[-1].strip() == "train(num_gpus=2, batch_size=512, lr=0.2)"
    assert not any("<NDArray" in cell or "并没有" in cell for cell in cells)


def changed(cell, shorter):
    for pattern, new in IMPORTS:
        cell = re.sub(pattern, new, cell, flags=re.MULTILINE)
    for old, new in shorter:
        cell = cell.replace(old, new)
    return cell


def run(cells, shorter, place):
    """Run cells one after another, as a notebook does, with their lines in tracebacks."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        file, text = f"<{place}, cell {number}>", changed(cell, shorter)
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), names)
    return names


class Some:
    """Some batches of an iterable."""

    def __init__(self, batches, count):
        self._batches = batches
        self._count = count

    def __iter__(self):
        return itertools.islice(self._batches, self._count)


@pytest.fixture
def some_batches(monkeypatch, fashion_mnist_dir):
    """Let the book's loader give two batches for training, and one to test with."""
    load = functools.partial(d2l.load_data_fashion_mnist, root=fashion_mnist_dir)

    def some(batch_size):
        return tuple(Some(one, count) for one, count in zip(load(batch_size), (2, 1), strict=True))

    monkeypatch.setattr(d2l, "load_data_fashion_mnist", some)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("number", CELLS)
def test_every_cell_runs(number, some_batches, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make, shorter = CELLS[number]
    names = run(make(), shorter, f"document {number}")
    shown = capsys.readouterr().out
    exported = {"my_mlp-symbol.json", "my_mlp-0000.params", "my_mlp.pt2"}
    assert set(os.listdir(tmp_path)) <= {*exported, "animator.png"}
    if number == "002":
        assert "running on: [gpu(0), gpu(1)]\nepoch 1, time " in shown
    if number == "003":
        assert "<NDArray 1x2 @cpu(0)>" not in shown  # a notebook shows it, `exec` does not
        assert "Workloads are queued. time: 0.0" in shown
        assert "hidden:  <Symbol hybridnet0_relu0>" in shown
        assert shown.count("running on: [gpu(0), gpu(1)]\nepoch 1, time ") == 2
        assert "not initialized on cpu(0)" in shown
    if number == "004":
        assert "not initialized on cpu\n" in shown
        assert " sec/epoch on [gpu(0), gpu(1)]" in shown
    assert number == "002" or isinstance(names["net"], mx.gluon.Block)
