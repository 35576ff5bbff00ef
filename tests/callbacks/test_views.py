"""A progress bar and a live curve: one output each, in a notebook."""

import nbformat
import pytest

from evenstep.callbacks import Callback, LiveCurve, ProgressBar, StepRecord
from evenstep.errors import InputError
from trainers import open_trainer
from zoo import build, make_batches

BATCHES = make_batches((24, 17, 24))
PROGRAM = """
import torch
from torch import nn

import evenstep
from evenstep.callbacks import LiveCurve, ProgressBar

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
X, y = torch.randn(64, 4), torch.arange(64) % 2
views = [ProgressBar(total=50), LiveCurve(redraws_per_s=1000)]
with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), callbacks=views) as trainer:
    for _ in range(50):
        trainer.step(X, y)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
def test_a_notebook_shows_one_picture_and_one_bar(tmp_path):
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PROGRAM)])
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = notebook.cells[0].outputs
    pictures = [one for one in outputs if "image/png" in one.get("data", {})]
    assert len(pictures) == 1
    text = "".join(one.get("text", "") for one in outputs)
    widgets = [one for one in outputs if "widget-view" in str(one.get("data", {}))]
    assert "50/50" in text or len(widgets) == 1
    assert "IProgress" not in text


def test_a_bar_shows_the_steps_and_the_loss(capfd):
    losses = []

    class Losses(Callback):
        def on_step(self, record):
            losses.append(record.loss)

    with open_trainer(build("convolution"), callbacks=[ProgressBar(total=3), Losses()]) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
    shown = capfd.readouterr().err
    assert "3/3" in shown
    assert f"epoch 1, loss {losses[-1]:.4f}" in shown


def test_a_curve_draws_as_often_as_asked_and_keeps_few_points(monkeypatch):
    drawn = []
    curve = LiveCurve(redraws_per_s=1e-6)
    monkeypatch.setattr(curve, "_draw", lambda: drawn.append(len(curve._steps)))
    for step in range(1, 10_001):
        curve.on_step(
            StepRecord(
                step=step, epoch=0, loss=1 / step, outputs={}, lrs=(0.1,), examples=8,
                seconds=0.01, busy={},
            )
        )  # fmt: skip
    curve.close()
    assert len(drawn) == 2  # the first step, and the end
    assert 1_000 <= drawn[-1] <= 2_000
    assert all(1 / step == loss for step, loss in zip(curve._steps, curve._losses, strict=True))


def test_a_curve_needs_a_notebook():
    with pytest.raises(InputError, match="a live curve needs a notebook"):
        open_trainer(build("convolution"), callbacks=[LiveCurve()]).__enter__()
    with pytest.raises(InputError, match="got redraws_per_s=0"):
        LiveCurve(redraws_per_s=0)
