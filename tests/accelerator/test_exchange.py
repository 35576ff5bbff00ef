"""Gradients between emulated accelerators of several processes, through their own backend."""

import contextlib

import pytest
import torch
from torch import nn

import emu
import evenstep
from launched import apart, launched

CASES = 6


def exchanged(tmp_path, processes, mode, *fault):
    """Run the job; return what each process has found."""
    finished = launched(processes, "exchanged.py", tmp_path / "found", mode, 0, *fault)
    assert finished.returncode == 0, finished.stderr
    return [torch.load(tmp_path / f"found.{rank}", weights_only=False) for rank in range(processes)]


def sums_of(found):
    return [(name, one) for name, steps in found.items() if name != "refused" for one in steps]


@pytest.mark.parametrize(
    ("processes", "mode"),
    [
        (2, "lazy"),
        (3, "lazy"),
        (4, "random"),
        pytest.param(1, "lazy", marks=pytest.mark.slow),
        pytest.param(2, "thread", marks=pytest.mark.slow),
        pytest.param(4, "lazy", marks=pytest.mark.slow),
        pytest.param(3, "random", marks=pytest.mark.slow),
        pytest.param(4, "thread", marks=pytest.mark.slow),
    ],
)
def test_sums_have_the_bits_of_one_place_and_never_pass_the_host(tmp_path, processes, mode):
    for found in exchanged(tmp_path, processes, mode):
        assert len(found) == CASES
        for name, one in sums_of(found):
            assert one["right"], name
            assert one["copies"] == (0, 0), name
            assert set(one["waits"]) <= {emu.POLLING}, name
            assert one["waits"][emu.POLLING] <= 1, name
            moved = one["moved"]
            sent = moved["all_to_all"] + moved["all_gather"]
            ring = [2 * n * size * (processes - 1) / processes for n, size in one["buckets"]]
            if one["partials"] == 1 and all(n % processes == 0 for n, _ in one["buckets"]):
                assert sent == sum(ring), name
            assert moved["all_to_all calls"] == moved["all_gather calls"] == len(ring)


@pytest.mark.parametrize(("fault", "processes"), [("no wait", 2), ("reused", 3)])
def test_a_mistake_with_streams_gives_other_bits(tmp_path, fault, processes):
    for found in exchanged(tmp_path, processes, "lazy", fault):
        assert not all(one["right"] for _, one in sums_of(found))


@pytest.mark.slow
def test_buckets_in_an_order_of_each_process_s_own_give_an_error_or_other_bits(tmp_path):
    finished = launched(2, "exchanged.py", tmp_path / "found", "lazy", 0, "any order")
    assert finished.returncode != 0


# ---- trainings


def trained(tmp_path, processes, mode, devices, backend):
    """Run the job; return what each process has found, and what it has said."""
    ended = apart(
        "backends.py",
        *(tmp_path / "found", mode, devices, backend),
        variables=[{}] * processes,
        within=[()] * processes,
    )
    found = [None] * processes
    for rank in range(processes):
        with contextlib.suppress(FileNotFoundError):
            found[rank] = torch.load(tmp_path / f"found.{rank}", weights_only=False)
    return found, ended


def fingerprint_in_one_process():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 1200), nn.ReLU(), nn.Linear(1200, 1200), nn.Tanh(), nn.Linear(1200, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices="cpu:0", shards=4
    ) as trainer:
        for step in range(4):
            given = torch.Generator().manual_seed(step)
            trainer.step(torch.randn(13, 6, generator=given), torch.arange(13) % 3)
        return trainer.fingerprint()


@pytest.mark.parametrize(
    ("processes", "mode", "devices"),
    [
        (2, "lazy", "emu:0"),
        pytest.param(2, "lazy", "emu:0,emu:1", marks=pytest.mark.slow),
        pytest.param(3, "random", "emu:1", marks=pytest.mark.slow),
        pytest.param(4, "thread", "emu:0", marks=pytest.mark.slow),
    ],
)
def test_a_training_s_gradients_stay_on_accelerators(tmp_path, processes, mode, devices):
    found, ended = trained(tmp_path, processes, mode, devices, "emuccl")
    assert [code for code, *_ in ended] == [0] * processes, ended
    one_lane = "," not in devices
    for rank in range(processes):
        assert found[rank]["fingerprint"] == fingerprint_in_one_process()
        nbytes = found[rank]["nbytes"]
        assert found[rank]["copies"][2][1] < nbytes / 20, found[rank]
        assert {*found[rank]["waits"][2]} == {emu.POLLING}  # the fourth step is checked again
        assert "through the CPU" not in ended[rank][2]
        if processes == 2:
            moved = found[rank]["moved"][-1]
            sent = moved["all_to_all"] + moved["all_gather"]
            assert nbytes <= sent < nbytes + 4096  # gradients begin at multiples of 64 bytes
            if one_lane:  # a bucket is on the way before the backward pass has ended
                assert found[rank]["early"][-1] >= 1


@pytest.mark.parametrize("backend", ["none", "lacking"])
def test_without_a_backend_gradients_go_through_the_cpu_and_one_line_says_so(tmp_path, backend):
    found, ended = trained(tmp_path, 2, "lazy", "emu:0", backend)
    assert [code for code, *_ in ended] == [0, 0], ended
    said = "gradients travel between processes through the CPU and gloo"
    assert [errors.count(said) for _, _, errors in ended] == [1, 0]
    for one in found:
        assert one["fingerprint"] == fingerprint_in_one_process()
        assert not any(one["moved"])
        assert all(copied > one["nbytes"] for _, copied in one["copies"])


def test_a_backend_that_gives_chunks_to_wrong_ranks_is_refused(tmp_path):
    _, ended = trained(tmp_path, 2, "lazy", "emu:0", "swapping")
    for code, _, errors in ended:
        assert code != 0
        assert "WrongSumError" in errors


def test_a_process_that_is_lost_in_the_exchange_is_named(tmp_path):
    _, ended = trained(tmp_path, 2, "lazy", "emu:0", "killed")
    assert ended[0][0] == 1
    assert "rank 1 has left" in ended[0][2]
