"""Curves of a training: one picture in a notebook, lines of text on a terminal."""

import math

import pytest

from evenstep.callbacks import LiveCurve, StepRecord
from evenstep.callbacks.terminal_curve import curve_lines
from evenstep.errors import InputError
from screen import lines_on_screen, on_a_terminal

PROGRAM = """
import torch
from torch import nn

import evenstep
from evenstep.callbacks import LiveCurve

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
X, y = torch.randn(64, 4), torch.arange(64) % 2
curve = LiveCurve(redraws_per_s=1000)
with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), callbacks=[curve]) as trainer:
    for _ in range(50):
        trainer.step(X, y)
    curve.add(trainer.steps_done, {"accuracy": 0.5, "test loss": 0.7})
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
def test_a_notebook_shows_one_picture(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PROGRAM)])
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = notebook.cells[0].outputs
    assert len([one for one in outputs if "image/png" in one.get("data", {})]) == 1
    assert "Warning" not in "".join(one.get("text", "") for one in outputs)


def test_a_terminal_shows_curves_at_the_end():
    status, written = on_a_terminal(PROGRAM)
    assert status == 0, written
    shown = lines_on_screen(written)
    names = [line.strip() for line in shown if line.strip() in ("loss", "accuracy", "test loss")]
    assert names == ["loss", "accuracy", "test loss"]
    assert any(line.split() == ["step", "1", "50"] for line in shown)


def test_no_terminal_no_curve(capsys):
    curve = LiveCurve()
    curve.open(0)
    curve.add(1, {"accuracy": 0.5})
    curve.close()
    assert capsys.readouterr().out == ""


def test_a_notebook_draws_as_often_as_asked_and_keeps_few_points(monkeypatch):
    drawn = []
    curve = LiveCurve(redraws_per_s=1e-6)
    monkeypatch.setattr("evenstep.callbacks.curve.in_notebook", lambda: True)
    monkeypatch.setattr(curve, "_draw", lambda: drawn.append([*curve._curves["loss"].steps]))
    for step in range(1, 10_001):
        curve.on_step(
            StepRecord(
                step=step, epoch=0, loss=1 / step, outputs={}, lrs=(0.1,), examples=8,
                seconds=0.01, busy={},
            )
        )  # fmt: skip
    curve.close()
    assert len(drawn) == 2  # the first step, and the end
    assert 1_000 <= len(drawn[-1]) <= 2_000
    loss = curve._curves["loss"]
    assert all(1 / step == value for step, value in zip(loss.steps, loss.values, strict=True))


def test_redraws_are_a_positive_number():
    with pytest.raises(InputError, match="got redraws_per_s=0"):
        LiveCurve(redraws_per_s=0)


# ---- lines of text


def dots(lines):
    """Return the places (column, row) of the dots in the lines of a curve, from the left top."""
    bits = [(0, 0, 1), (0, 1, 2), (0, 2, 4), (1, 0, 8), (1, 1, 16), (1, 2, 32), (0, 3, 64)]
    bits.append((1, 3, 128))
    return {
        (2 * at + column, 4 * number + row)
        for number, line in enumerate(lines[1:-1])
        for at, letter in enumerate(line.partition("│")[2])
        for column, row, bit in bits
        if (ord(letter) - 0x2800) & bit
    }


def test_a_falling_line_goes_from_the_left_top_to_the_right_bottom():
    lines = curve_lines("loss", range(1, 121), [120 - n for n in range(120)])
    found = dots(lines)
    assert {(0, 0), (119, 31)} <= found
    assert {column for column, _ in found} == set(range(120))
    assert all(abs(row - 31 * column / 119) <= 0.5 for column, row in found)
    assert lines[1].split("│")[0].strip() == "120"
    assert lines[-2].split("│")[0].strip() == "1"
    assert lines[-1].split() == ["step", "1", "120"]


def test_a_column_shows_the_mean_of_its_points():
    values = [0.0, *[1.0, 0.0] * 6000, 1.0]
    found = dots(curve_lines("loss", range(len(values)), values))
    assert {row for column, row in found if 0 < column < 119} <= {15, 16}


def test_points_that_are_far_apart_are_connected():
    found = dots(curve_lines("loss", [0, 10], [0.0, 1.0]))
    assert {(0, 31), (119, 0)} <= found
    assert {column for column, _ in found} == set(range(120))


@pytest.mark.parametrize(
    ("steps", "values", "rows"), [([5], [2.0], 1), ([1, 2], [3.0, 3.0], 1), ([1, 2], [1, 2], 8)]
)
def test_few_or_equal_values(steps, values, rows):
    lines = curve_lines("loss", steps, values)
    assert len({row // 4 for _, row in dots(lines)}) == rows


def test_what_is_not_finite_is_left_out():
    odd = [1.0, math.nan, math.inf, 0.5]
    assert curve_lines("loss", [1, 2, 3, 4], odd) == curve_lines("loss", [1, 4], [1.0, 0.5])
    assert curve_lines("loss", [1], [math.nan]) == []


def test_other_encodings_get_stars():
    lines = curve_lines("loss", [1, 2], [1, 2], "latin-1")
    assert all(line.isascii() for line in lines)
    assert sum("*" in line for line in lines) == 8
