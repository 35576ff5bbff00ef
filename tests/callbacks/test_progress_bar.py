"""A progress bar: on a terminal, in a notebook, and where nobody sees it."""

import re
import sys

import pytest

from evenstep.callbacks import Callback, LiveCurve, ProgressBar
from screen import lines_on_screen, on_a_terminal
from trainers import open_trainer
from warm import run
from zoo import build, make_batches

BATCHES = make_batches((24, 17, 24))
PROGRAM = """
import logging
import sys

import torch
from torch import nn

import evenstep
from evenstep.callbacks import ProgressBar

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(64, 4), torch.arange(64) % 2) for _ in range(7)]
bar = ProgressBar(TOTAL)
terminal = sys.stdout
with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), callbacks=[bar]) as trainer:
    for epoch in range(2):
        for number, (X, y) in enumerate(trainer.epoch(loader)):
            loss = trainer.step(X, y)
            if number == 3:
                print("printed in", epoch)
                logging.warning("logged in %d", epoch)
                print("no end", end="")
        print("after", epoch, f"{loss:.4f}")
assert sys.stdout is terminal
print("the end")
logging.warning("logged at last")
"""


def test_on_a_terminal_each_epoch_has_a_bar_and_nothing_is_glued_to_it():
    status, written = on_a_terminal(PROGRAM.replace("TOTAL", ""))
    shown = lines_on_screen(written)
    assert status == 0, written
    bars = [line for line in shown if "steps/s" in line]
    assert len(bars) == 2
    for number, bar in enumerate(bars):
        assert re.match(rf"epoch {number + 1}: 100%\|.+\| 7/7 \[", bar)
        assert re.search(r"steps/s, mean loss 0\.\d{4}, busy( \d+%)+\]$", bar)
    others = [line for line in shown if line and line not in bars]
    for number in range(2):
        assert f"printed in {number}" in others
        assert f"WARNING:root:logged in {number}" in others
        assert any(re.fullmatch(rf"after {number} 0\.\d{{4}}", line) for line in others)
    assert others[-2:] == ["the end", "WARNING:root:logged at last"]
    assert "no end" in others


def test_a_bar_for_the_whole_training_shows_the_last_loss():
    status, written = on_a_terminal(PROGRAM.replace("TOTAL", "14"))
    assert status == 0, written
    (bar,) = [line for line in lines_on_screen(written) if "steps/s" in line]
    last = re.search(r"after 1 (\S+)", written).group(1)
    assert "14/14" in bar
    assert f"epoch 2, loss {last}, busy" in bar


def test_on_a_pipe_nothing_is_shown():
    done = run("-c", PROGRAM.replace("TOTAL", ""))
    assert done.returncode == 0
    assert "%" not in done.stderr + done.stdout
    assert done.stdout.count("printed") == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
def test_a_notebook_shows_one_bar_for_each_epoch(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    program = PROGRAM.replace("TOTAL", "").replace('print("no end", end="")', "pass")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(program)])
    NotebookClient(notebook, timeout=100, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = notebook.cells[0].outputs
    text = "".join(one.get("text", "") for one in outputs)
    widgets = [one for one in outputs if "widget-view" in str(one.get("data", {}))]
    assert text.count("7/7") == 2 or len(widgets) == 2
    assert "IProgress" not in text


@pytest.mark.parametrize("in_flight", [1, 3])
def test_what_starts_is_reported_after_the_steps_before_it(in_flight):
    seen = []

    class Seen(Callback):
        def on_epoch_start(self, start):
            seen.append((start.epoch, start.step, start.first, start.steps))

        def on_step(self, record):
            seen.append(record.step)

    with open_trainer(build("convolution"), callbacks=[Seen()], max_in_flight=in_flight) as trainer:
        for X, y in trainer.epoch(BATCHES):
            trainer.step(X, y)
        for X, y in trainer.epoch(WithoutLength(BATCHES)):
            trainer.step(X, y)
            break
        for X, y in trainer.epoch(BATCHES):
            trainer.step(X, y)
    starts = [(0, 0, 0, 3), 1, 2, 3, (1, 3, 0, None), 4, (1, 4, 1, 3), 5, 6]
    assert seen == starts


class WithoutLength:
    """Batches without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_a_bar_outside_of_epochs_counts_the_steps(capfd):
    bar = ProgressBar()
    with open_trainer(build("convolution"), callbacks=[bar]) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
    assert capfd.readouterr().err == ""


def test_a_program_without_a_console_shows_nothing(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with open_trainer(
        build("convolution"), callbacks=[ProgressBar(total=3), LiveCurve()]
    ) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
    assert trainer.steps_done == len(BATCHES)
