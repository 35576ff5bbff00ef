"""Changes of the whole process while trainers and engines are open, and what is left after them."""

import sys
from contextlib import contextmanager

import pytest
import torch

import evenstep
from evenstep.devices import process_wide, short_switch_interval
from evenstep.engine import InlineLanes
from evenstep.errors import DeviceError, EvenstepError


@pytest.fixture(autouse=True)
def pythons_interval():
    earlier_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(earlier_s)


def recorded(events):
    @process_wide
    @contextmanager
    def change():
        events.append("begin")
        yield
        events.append("end")

    return change


def test_overlapping_contexts_change_the_process_once():
    events = []
    change = recorded(events)
    first, second = change(), change()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert events == ["begin"]
    second.__exit__(None, None, None)
    assert events == ["begin", "end"]
    with change():
        assert events == ["begin", "end", "begin"]
    assert events == ["begin", "end", "begin", "end"]


def test_after_a_change_that_failed_the_next_one_is_made():
    failures = [OSError("no")]

    @process_wide
    @contextmanager
    def change():
        if failures:
            raise failures.pop()
        failures.append("changed")
        yield

    with pytest.raises(OSError, match="no"):
        change().__enter__()
    with change():
        assert failures == ["changed"]


def test_lanes_take_turns_sooner_while_an_engine_is_open():
    with evenstep.Engine(devices=2):
        assert sys.getswitchinterval() == pytest.approx(1e-4)
        with evenstep.Engine(devices=1, lanes=InlineLanes):
            pass
        assert sys.getswitchinterval() == pytest.approx(1e-4)
    assert sys.getswitchinterval() == 0.005


def test_the_interval_is_restored_when_a_device_cannot_start(monkeypatch):
    def refuse(lanes):
        raise DeviceError("no thread")

    monkeypatch.setattr("evenstep.engine.lanes.ThreadLanes.open", refuse)
    with pytest.raises(DeviceError, match="no thread"):
        evenstep.Engine(devices=1).__enter__()
    assert sys.getswitchinterval() == 0.005


def test_the_interval_is_restored_after_a_step_that_failed():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(EvenstepError), evenstep.Trainer(model, optimizer, str) as trainer:
        trainer.step(torch.ones(8, 2), torch.ones(8, 1))
    assert sys.getswitchinterval() == 0.005


def test_an_interval_that_the_program_chooses_is_kept():
    sys.setswitchinterval(1e-5)
    with short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    assert sys.getswitchinterval() == pytest.approx(1e-5)
    sys.setswitchinterval(0.005)
    with short_switch_interval():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == 0.02
