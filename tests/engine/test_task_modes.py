"""Modes: what holds in the thread that submits a task holds in the task, and nowhere else."""

import contextlib
import contextvars
import threading

import pytest
import torch

from evenstep.devices import Device
from evenstep.engine import Engine, InlineLanes, Task, ThreadLanes
from layouts import TWO
from patience import HUNG_TESTS_ABORT, wait

pytestmark = HUNG_TESTS_ABORT


place = contextvars.ContextVar("place", default="nowhere")


def modes():
    x = torch.ones(2, 2, requires_grad=True)
    y = x @ x
    return y.requires_grad, y.is_inference(), y.dtype, place.get()


def no_mode():
    return contextlib.nullcontext()


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


MODES = {
    no_mode: (True, False, torch.float32, "nowhere"),
    torch.no_grad: (False, False, torch.float32, "nowhere"),
    torch.inference_mode: (False, True, torch.float32, "nowhere"),
    autocast: (True, False, torch.bfloat16, "nowhere"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_hold_in_the_task_and_not_beyond(engine, mode):
    gate = engine.submit(int)
    with mode():
        inside = engine.submit(modes)
        after_gate = engine.submit(lambda _: modes(), gate, device="cpu:1")
    outside = engine.submit(modes)
    assert inside.result() == after_gate.result() == MODES[mode]
    assert outside.result() == MODES[no_mode]
    assert modes() == MODES[no_mode]


def test_modes_of_the_submission_count_and_not_those_of_the_wait():
    gate = threading.Event()
    with Engine(1) as engine:
        engine.submit(wait, gate)
        with torch.no_grad(), autocast():
            inside = engine.submit(modes)
        outside = engine.submit(modes)
        with torch.inference_mode():
            gate.set()
            assert inside.result() == (False, False, torch.bfloat16, "nowhere")
            assert outside.result() == MODES[no_mode]


def test_modes_of_a_task_hold_in_those_that_it_submits(engine):
    def outer():
        with torch.enable_grad():
            return engine.submit(modes), engine.submit(modes)

    with torch.no_grad():
        plain = engine.submit(outer)
        direct = engine.submit(lambda: engine.submit(modes))
    for handle in plain.result():
        assert handle.result() == MODES[no_mode]
    assert direct.result().result() == MODES[torch.no_grad]


def test_modes_that_a_task_leaves_behind_reach_no_other(engine):
    engine.submit(torch.set_grad_enabled, False, device="cpu:0").result()
    engine.submit(torch.set_autocast_enabled, "cpu", True, device="cpu:1").result()
    for name in TWO:
        assert engine.submit(modes, device=name).result() == MODES[no_mode]
    assert modes() == MODES[no_mode]


def test_context_variables_hold_in_the_task_and_its_changes_stay_there(engine):
    token = place.set("here")
    inside = engine.submit(lambda: (place.get(), place.set("changed")))
    again = engine.submit(place.get)
    place.reset(token)
    assert inside.result()[0] == again.result() == "here"
    assert engine.submit(place.get).result() == place.get() == "nowhere"


# ---- threads within an op


@pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])
@pytest.mark.parametrize("callers", [1, 3])
def test_a_lane_has_its_devices_threads_whatever_the_caller_has(lanes, callers):
    torch.set_num_threads(callers)
    devices = [Device("cpu", index, threads=threads) for index, threads in enumerate([1, 2, 3])]
    with Engine(devices, lanes=lanes) as engine:
        for _ in range(2):
            tasks = [Task(torch.get_num_threads, lane=lane) for lane in range(6)]
            engine.submit_tasks(tasks)
            assert [engine.handle(task).result() for task in tasks] == [1, 2, 3, 1, 2, 3]
            assert torch.get_num_threads() == callers
            callers += 1
            torch.set_num_threads(callers)
