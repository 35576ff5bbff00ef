"""The engine: what tasks get, what they give, and who waits, with and without threads."""

import functools
import threading
import time

import numpy as np
import pytest
import torch

from evenstep.devices import Device
from evenstep.engine import Engine, Handle, InlineLanes, Task, ThreadLanes, Var
from evenstep.errors import ClosedError, DeadlockError, DeviceError, InputError
from layouts import TWO
from patience import HUNG_TESTS_ABORT, wait

pytestmark = HUNG_TESTS_ABORT


both = pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])


def add(x, y):
    return x + y


# ---- tasks and their results


def test_a_handle_is_an_argument_and_arrives_as_its_value(engine):
    one = engine.submit(int, "1")
    three = engine.submit(add, one, 2, device="cpu:1")
    assert engine.submit(add, three, one, device="cpu:0").result() == 4
    assert one.result() == 1


def test_handles_and_vars_may_lie_in_lists_tuples_and_dicts(engine):
    one, x = engine.submit(int, "1"), engine.Var(["x"])
    nested = {"list": [one, (x, 2)], "plain": {"one": one}}
    result = engine.submit(lambda given: given, nested).result()
    assert result == {"list": [1, (["x"], 2)], "plain": {"one": 1}}
    assert nested["list"][0] is one  # what was given stays as it is


def test_a_task_runs_on_the_lane_it_is_bound_to():
    with Engine([Device("cpu", 0), Device("cpu", 1, own_memory=True)]) as engine:
        for name in ("cpu:0", "cpu:1:own"):
            where = engine.submit(lambda: threading.current_thread().name, device=name)
            assert where.result() == f"evenstep {name}"
        device = engine.devices[1]
        where = engine.submit(lambda: threading.current_thread().name, device=device)
        assert where.result() == "evenstep cpu:1:own"
        copied = engine.submit_tasks([task := Task(lambda: engine.lane_here, lane=3)])
        assert (copied, engine.handle(task).result()) == (None, 3)


def test_tasks_may_submit_tasks(engine):
    inner = []

    def outer():
        inner.append(engine.submit(add, 1, 2))
        return engine.submit(add, inner[0], 3)

    assert engine.submit(outer).result().result() == 6
    assert inner[0].result() == 3


def test_a_handle_tells_whether_it_is_done(engine):
    handle = engine.submit(int)
    handle.wait_to_read()
    assert handle.done


def test_waitall_waits_for_a_last_task_that_is_slow(engine):
    seen = []

    def slow():
        time.sleep(0.2)
        seen.append("done")

    for number in range(20):
        engine.submit(seen.append, number, device="cpu:0")
    engine.submit(slow, device="cpu:1")
    engine.waitall()
    assert {*seen} == {*range(20), "done"}


@both
def test_an_engine_may_be_opened_again(lanes):
    engine = Engine(TWO, lanes=lanes)
    for number in range(3):
        with engine:
            handle = engine.submit(int, number)
        assert handle.result() == number  # results outlive the lanes


@both
def test_a_closed_engine_refuses_tasks(lanes):
    engine = Engine(1, lanes=lanes)
    message = "the engine is not open: use it inside `with`"
    with pytest.raises(ClosedError, match=message):
        engine.submit(int)
    engine.close()  # nothing to close
    with engine, pytest.raises(ClosedError, match="the engine is open already"):
        engine.__enter__()
    with pytest.raises(ClosedError, match=message):
        engine.copy(torch.ones(2), "cpu:0")


# ---- the synchronising functions


def test_functions_that_wait_and_convert(engine, capsys):
    number = engine.submit(torch.tensor, 2.5)
    assert number.item() == 2.5
    assert float(number) == 2.5
    assert int(number) == 2
    assert bool(number) is True
    assert number.numpy() == np.float32(2.5)
    assert f"{number:.2f}" == "2.50"
    assert (f"{number}", str(number)) == ("2.5", "tensor(2.5000)")
    assert repr(number) == "Handle(tensor(2.5000))"
    print(number)
    assert capsys.readouterr().out == "tensor(2.5000)\n"


def test_what_is_no_tensor_converts_too(engine):
    assert engine.submit(int, "3").item() == 3
    assert engine.submit(list, (1, 2)).numpy().tolist() == [1, 2]
    weights = engine.submit(torch.ones, 2).result().requires_grad_()
    assert engine.submit(torch.mul, weights, 2).numpy().tolist() == [2, 2]


@pytest.mark.parametrize("function", [str, repr, float, Handle.item, Handle.numpy, "{:.1f}".format])
def test_each_of_them_waits_and_raises(function):
    gate = threading.Event()

    def fail():
        wait(gate)
        raise LookupError("late")

    with Engine(1) as engine:
        handle = engine.submit(fail)
        assert not handle.done
        gate.set()
        with pytest.raises(LookupError, match="late"):
            function(handle)


# ---- Vars


def test_a_var_is_read_and_written_in_the_order_of_submission(engine):
    x = engine.Var([])
    seen = []
    for number in range(50):
        engine.submit(list.append, x, number, writes=[x], device=TWO[number % 2])
        seen.append(engine.submit(len, x))
        engine.submit(len, x, device=TWO[number % 2])
    assert [handle.result() for handle in seen] == list(range(1, 51))
    assert x.result() == list(range(50))


def test_a_var_waits_for_those_who_write_it():
    gate = threading.Event()
    with Engine(2) as engine:
        x = engine.Var([1], name="x")
        other = engine.Var(7)
        engine.submit(lambda value: (wait(gate), value.append(2)), x, writes=[x])
        assert int(other) == 7
        gate.set()
        assert repr(x) == "Var([1, 2])"
        assert (x.name, other.name) == ("x", "Var 2")


def test_reads_beside_each_other_and_writes_alone():
    met = threading.Barrier(2)
    with Engine(2) as engine:
        x = engine.Var([])
        for _ in range(2):
            engine.submit(lambda value: met.wait(30), x)
        engine.submit(lambda: None, writes=[x])
        engine.submit(lambda: met.wait(30), reads=[x])
        engine.submit(met.wait, 30, reads=[x])


def test_reads_and_writes_may_be_named_for_what_is_no_argument(engine):
    seen = []
    x = engine.Var(None)
    for number in range(30):
        engine.submit(seen.append, number, writes=(var for var in [x]), device=TWO[number % 2])
    engine.submit(lambda: seen.append(len(seen)), reads=iter([x]), device="cpu:1").result()
    assert seen == list(range(31))


def test_a_var_may_hold_none_and_zero(engine):
    assert engine.Var(None).result() is None
    assert not engine.Var(0)
    assert isinstance(engine.Var(0), Var)


# ---- copies


def test_a_copy_is_memory_of_its_own_without_its_history(engine):
    weights = torch.ones(3, requires_grad=True)
    copy = engine.copy({"w": weights, "n": [1, None, "s"]}, "cpu:1").result()
    assert (copy["n"], copy["w"].tolist()) == ([1, None, "s"], [1, 1, 1])
    assert not copy["w"].requires_grad
    assert copy["w"].data_ptr() != weights.data_ptr()


def test_a_copy_takes_handles_and_vars_in_their_turn(engine):
    x = engine.Var(torch.zeros(2))
    engine.submit(torch.Tensor.add_, x, 1, writes=[x])
    copy = engine.copy([x, engine.submit(torch.ones, 1)], "cpu:0")
    engine.submit(torch.Tensor.add_, x, 1, writes=[x])
    assert [tensor.tolist() for tensor in copy.result()] == [[1, 1], [1]]
    assert x.numpy().tolist() == [2, 2]


# ---- what is refused


@pytest.mark.parametrize("name", ["cpu:7", "cpu:0:own", "gpu", "", 0, torch.device("cpu", 5)])
def test_a_device_that_the_engine_does_not_have_is_refused(engine, name):
    message = "got a device of type int" if name == 0 else "got device"
    if name == "cpu:7":
        message = "got device cpu:7, but the engine has cpu:0, cpu:1: use one of them"
    for call in (lambda: engine.copy(1, name), lambda: engine.submit(int, device=name)):
        with pytest.raises(DeviceError, match=message):
            call()


@pytest.mark.parametrize(
    ("device", "lane"),
    [("cpu:1", 1), (torch.device("cpu:1"), 1), (Device("cpu", 1), 1), ("cpu", 0)],
)
def test_a_device_is_given_by_name_as_torchs_or_as_ours(engine, device, lane):
    task = engine.submit(int, device=device).task
    assert engine.handle(task).result() == 0
    assert task.ran_on == lane
    assert engine.copy(1, device).result() == 1


@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_below_one_is_refused(bound):
    with pytest.raises(InputError, match=f"got max_in_flight={bound}: give at least 1, or None"):
        Engine(1, max_in_flight=bound)


def waiting_calls(engine):
    later = engine.submit(int)
    x = engine.Var(1)
    engine.submit(int, writes=[x])
    return {
        "result": later.result,
        "print": lambda: print(later),
        "float": lambda: float(later),
        "a var": x.item,
        "waitall": engine.waitall,
        "close": engine.close,
    }


@both
@pytest.mark.parametrize("call", ["result", "print", "float", "a var", "waitall", "close"])
def test_a_task_that_submits_and_waits_is_refused(lanes, call):
    def wait_inside():
        with pytest.raises(DeadlockError, match=r"would block its worker thread.*argument instead"):
            waiting_calls(engine)[call]()
        return "refused"

    with Engine(1, lanes=lanes) as engine:
        assert engine.submit(wait_inside).result() == "refused"
        assert engine.submit(int).result() == 0


@both
def test_a_task_that_submits_beyond_the_bound_is_refused(lanes):
    with Engine(1, lanes=lanes, max_in_flight=1) as engine:
        with pytest.raises(DeadlockError, match="submit a task beyond max_in_flight=1"):
            engine.submit(lambda: engine.submit(int)).result()
        assert engine.submit(int).result() == 0


def test_naming_a_task_waits_for_nothing():
    gate = threading.Event()
    with Engine(1) as engine:
        blocked = engine.submit(wait, gate, name="blocked")
        handles = [
            engine.submit(functools.partial(lambda handle: "ran", blocked)),
            engine.submit(functools.partial(int, base=2), "11"),
            engine.submit(torch.nn.Linear(1, 1), torch.ones(1)),
        ]
        assert [handle.task.name for handle in handles] == ["<lambda>", "int", "Linear"]
        gate.set()
        assert handles[0].result() == "ran"
