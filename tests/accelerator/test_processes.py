"""Several processes that train on emulated accelerators, whose gradients go through the host."""

import pytest
import torch
from torch import nn

import evenstep
from launched import launched
from reference import assert_same_bits, whole_state
from zoo import build, make_batches


def train():
    model = build("convolution")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices="cpu:0") as trainer:
        losses = [float(trainer.step(X, y)) for X, y in make_batches((33, 16, 30))]
    return whole_state(model, optimizer), losses


@pytest.mark.parametrize(
    ("processes", "mode", "devices"),
    [
        (2, "lazy", "emu:0,emu:1"),
        (2, "thread", "cpu:0,emu:1"),
        pytest.param(3, "random", "emu:2", marks=pytest.mark.slow),
    ],
)
def test_processes_train_with_the_bits_of_one_on_a_cpu(tmp_path, processes, mode, devices):
    finished = launched(processes, "accelerated.py", tmp_path / "state", mode, devices)
    assert finished.returncode == 0, finished.stderr
    state, losses = torch.load(tmp_path / "state")
    expected, their_losses = train()
    assert_same_bits(state, expected)
    assert losses == their_losses
