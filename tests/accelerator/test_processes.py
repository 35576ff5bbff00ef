"""Several processes that train on emulated accelerators, with a backend and without."""

import signal

import pytest
import torch
from torch import nn

import evenstep
from launched import alone, launched
from reference import assert_same_bits
from zoo import build, make_batches


def train():
    model = build("batch_norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices="cpu:0") as trainer:
        losses = [float(trainer.step(X, y)) for X, y in make_batches((33, 16, 30))]
        return model.state_dict(), losses, trainer.fingerprint()


@pytest.mark.parametrize(
    ("processes", "mode", "devices", "divide", "in_flight"),
    [
        (2, "lazy", "emu:0,emu:1", "nothing", 1),
        (2, "thread", "cpu:0,emu:1", "nothing", 1),
        (2, "lazy", "emu:0,emu:1", "owners", 2),
        (2, "random", "emu:0,emu:1", "stages", 1),
        (2, "lazy", "emu:1,emu:0", "stages,owners", 2),
        pytest.param(2, "random", "emu:0", "owners", 1, marks=pytest.mark.slow),
        pytest.param(3, "thread", "emu:2,emu:0", "owners", 1, marks=pytest.mark.slow),
        pytest.param(3, "random", "emu:2", "nothing", 2, marks=pytest.mark.slow),
    ],
)
def test_processes_train_with_the_bits_of_one_on_a_cpu(
    tmp_path, processes, mode, devices, divide, in_flight
):
    given = mode, devices, divide, str(in_flight)
    finished = launched(processes, "accelerated.py", tmp_path / "state", *given)
    assert finished.returncode == 0, finished.stderr
    state, *others = torch.load(tmp_path / "state")
    expected, *expected_others = train()
    assert_same_bits(state, expected)
    assert others == expected_others


@pytest.mark.parametrize(
    ("rank", "at", "divide", "since"),
    [
        (0, 3, "nothing", "sum"),
        (1, 1, "nothing", "sum"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (1, 3, "nothing", "sum"),
                (0, 3, "owners", "sum"),
                (0, 1, "nothing", "start"),
                (1, 3, "nothing", "start"),
                (0, 3, "owners", "start"),
            ]
        ),
    ],
)
def test_a_kernel_that_fails_anywhere_leaves_no_wrong_bit(tmp_path, rank, at, divide, since):
    model = build("batch_norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices="cpu:0", shards=8
    ) as trainer:
        for X, y in make_batches((33, 16, 30, 24)):
            trainer.step(X, y)
        expected = trainer.fingerprint()
    finished = launched(2, "failing_kernels.py", tmp_path / "found", rank, at, divide, since)
    assert finished.returncode == 0, finished.stderr
    found = torch.load(tmp_path / "found")
    assert {*found} - {None} == {expected}
    assert found.count(expected) > 10


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_training_that_is_killed_again_and_again_goes_on_with_the_same_bits(tmp_path, in_flight):
    model = build("batch_norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices="cpu:0") as trainer:
        for X, y in make_batches((33, 16, 30, 24, 33, 16)):
            trainer.step(X, y)
        expected = trainer.fingerprint()
    killed_at = iter((45, 29, 37))
    for devices, mode in (
        ("emu:0,emu:1", "lazy"),
        ("cpu:0,emu:2", "random"),
        ("emu:1", "thread"),
        ("emu:3,emu:3,cpu:0", "lazy"),
    ):
        given = tmp_path / "saved", devices, mode, in_flight, next(killed_at, 0)
        finished = alone("killed_on_accelerators.py", *given)
        assert finished.returncode == (-signal.SIGKILL if given[-1] else 0), finished.stderr
    assert finished.stdout.strip() == expected
