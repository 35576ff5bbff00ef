"""The engine on GPUs: lanes with streams of their own, ordered by events; skipped without one."""

import pytest
import torch

from evenstep import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

TWO_LANES = ["cuda:0", "cuda:0"]
SIZE = 2000


def busy(x):
    for _ in range(20):
        x = (x @ x).clamp(-1, 1)
    return x


def test_a_lane_has_a_stream_of_its_own():
    with Engine(TWO_LANES) as engine:
        streams = {
            engine.submit(lambda: torch.cuda.current_stream().cuda_stream).result()
            for _ in range(20)
        }
    assert torch.cuda.default_stream().cuda_stream not in streams


def test_what_crosses_lanes_is_ordered_by_events():
    x = torch.rand(SIZE, SIZE, device="cuda")
    expected = busy(busy(x)) + 1
    with Engine(TWO_LANES) as engine:
        for _ in range(20):
            y = engine.submit(busy, engine.submit(busy, x))
            assert torch.equal(engine.submit(torch.add, y, 1).result(), expected)


def test_work_that_the_front_end_launched_comes_first():
    with Engine(["cuda:0"]) as engine:
        for _ in range(20):
            x = busy(torch.rand(SIZE, SIZE, device="cuda"))  # not waited for
            assert torch.equal(engine.submit(torch.neg, x).result(), -x)


def test_a_var_is_written_and_read_in_turn_across_lanes():
    with Engine(TWO_LANES) as engine:
        total = engine.Var(torch.zeros(SIZE, SIZE, device="cuda"))
        one = torch.ones(SIZE, SIZE, device="cuda")
        seen = []
        for _ in range(50):
            engine.submit(torch.Tensor.add_, total, one, writes=[total])
            seen.append(engine.submit(torch.sum, total))
        assert [float(handle) for handle in seen] == [SIZE * SIZE * n for n in range(1, 51)]


def test_copies_run_beside_computation_and_back():
    x = torch.rand(SIZE, SIZE)
    with Engine(["cuda:0", "cpu:0"]) as engine:
        for _ in range(10):
            there = engine.copy(x, "cuda:0")
            back = engine.copy(engine.submit(torch.neg, there, device="cuda:0"), "cpu:0")
            assert back.result().device.type == "cpu"
            assert torch.equal(back.result(), -x)


def test_waitall_waits_for_the_kernels():
    x = torch.rand(SIZE, SIZE, device="cuda")
    with Engine(["cuda:0"]) as engine:
        handle = engine.submit(busy, x)
        engine.waitall()
        assert handle.task.fence.query()
