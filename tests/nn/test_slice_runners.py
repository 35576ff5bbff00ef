"""Devices that compute slices together: who computes what, what is sent, and how it ends."""

import threading

import pytest
import torch
from torch import nn

from evenstep.devices import as_device
from evenstep.errors import DeviceLostError
from evenstep.nn import SlicedLinear, slice_
from evenstep.nn.slice_runners import (
    Exchanged,
    KeptPart,
    SlicingDevices,
    SlicingStoppedError,
)
from patience import HUNG_TESTS_ABORT, wait
from slicing import crew_of

pytestmark = HUNG_TESTS_ABORT


def name_here(number, tensor):
    return (torch.tensor([threading.get_ident(), number]),)


def test_each_device_computes_its_run_of_slices():
    with crew_of(["cpu:0", "cpu:1", "cpu:2"]) as runner:
        found = [one.tolist() for (one,) in runner.run(name_here, [(None,)] * 5)]
    threads = [thread for thread, _ in found]
    assert [number for _, number in found] == [*range(5)]
    assert threads[0] == threads[1] == threading.get_ident()
    assert threads[2] == threads[3]
    assert len({*threads}) == 3


def test_the_lead_waits_for_the_last_device():
    first = threading.Event()

    def last_one_late(number, tensor):
        if number == 1:
            first.set()
        elif number == 2:
            wait(first)
            threading.Event().wait(0.1)  # a lead that waits for any device would overtake this
        return (torch.tensor(number),)

    with crew_of(["cpu:0", "cpu:1", "cpu:2"]) as runner:
        found = runner.run(last_one_late, [(None,)] * 3)
    assert [one.item() for (one,) in found] == [0, 1, 2]


def test_a_device_with_memory_of_its_own_holds_its_slices_of_the_weights_and_no_others():
    """What is sent: x once for each device, each held part once, and the results."""
    exchanged = Exchanged()
    weight, x = (torch.randint(9, (rows, 16)).float() for rows in (8, 4))  # exact products
    parts = [KeptPart(("weight", n), part) for n, part in enumerate(weight.chunk(8))]
    seen = {}

    def product(number, x, part):
        seen.setdefault(number, set()).add(part.untyped_storage().data_ptr())
        return (x @ part.t(),)

    with crew_of(["cpu:0", "cpu:1:own"], exchanged) as runner:
        for _ in range(2):
            found = runner.run(product, [(x, part) for part in parts])
            assert torch.equal(torch.cat([one for (one,) in found], 1), x @ weight.t())
    home = weight.untyped_storage().data_ptr()
    assert all(places == {home} for number, places in seen.items() if number < 4)
    assert all(len(places) == 1 and home not in places for n, places in seen.items() if n >= 4)
    each_time = x.nbytes + 4 * 4 * 4
    assert exchanged.nbytes == 2 * each_time + weight.nbytes // 2
    assert exchanged.waits == 2


def test_what_a_layer_sends_to_a_device_with_memory_of_its_own():
    """Forward: x, half of weight and bias, and half of y; backward: half of dy, x, and dx, dw."""
    exchanged = Exchanged()
    layer = SlicedLinear(16, 8, slices=2)
    x = torch.randn(4, 16, requires_grad=True)
    with crew_of(["cpu:0", "cpu:1:own"], exchanged):
        layer(x).backward(torch.randn(4, 8))
    half_of_parameters = 4 * (16 * 8 + 8) // 2
    forward = x.nbytes + half_of_parameters + 4 * 4 * 8 // 2
    backward = 4 * 4 * 8 // 2 + x.nbytes + x.nbytes + half_of_parameters
    held = {"cpu:1:own": half_of_parameters}
    assert exchanged == Exchanged(nbytes=forward + backward, waits=2, held=held)


def test_an_error_in_a_slice_is_raised_where_the_layer_was_called():
    def fails(number, tensor):
        if number == 1:
            raise ArithmeticError("slice 1")
        return (torch.zeros(1),)

    with crew_of(["cpu:0", "cpu:1"]) as runner:
        with pytest.raises(ArithmeticError, match="slice 1"):
            runner.run(fails, [(None,)] * 2)
        assert len(runner.run(lambda number, one: (one,), [(None,)] * 2)) == 2


def lead_that_waits():
    """Return a runner, and a thread in which its lead waits for a slice of lane 1."""
    runner = SlicingDevices({lane: as_device(f"cpu:{lane}") for lane in range(2)}, Exchanged())
    outcome, is_at_work = [], threading.Event()

    def lead():
        try:
            runner.run(lambda number, one: is_at_work.set() or (one,), [(None,)] * 2)
        except SlicingStoppedError as error:
            outcome.append(error)

    thread = threading.Thread(target=lead)
    thread.start()
    wait(is_at_work)
    return runner, thread, outcome


def test_a_lead_that_waits_is_stopped():
    runner, thread, outcome = lead_that_waits()
    runner.stop()
    thread.join(40)
    assert len(outcome) == 1
    with pytest.raises(SlicingStoppedError):
        runner.run(lambda number, one: (one,), [(None,)] * 2)
    runner.help(1)  # returns


def test_of_a_stuck_crew_the_device_is_named_that_the_others_wait_for():
    runner, thread, _ = lead_that_waits()
    while runner.keeping([0]) != [1]:
        threading.Event().wait(0.001)
    assert runner.keeping([]) == []
    runner.stop()
    thread.join(40)
    assert runner.keeping([0]) == [0]


def test_the_failure_of_a_device_stays_in_its_lane():
    runner = SlicingDevices({lane: as_device(f"cpu:{lane}") for lane in range(2)}, Exchanged())
    ended = []

    def compute(number, one):
        if number == 1:
            raise DeviceLostError("gone")
        return (one,)

    def helper():
        try:
            runner.help(1)
        except DeviceLostError as error:
            ended.append(error)
            runner.stop()  # as an attempt does that is dropped

    thread = threading.Thread(target=helper)
    thread.start()
    with pytest.raises(SlicingStoppedError):
        runner.run(compute, [(None,)] * 2)
    thread.join(40)
    assert len(ended) == 1


def test_slices_beyond_the_devices_and_devices_beyond_the_slices():
    torch.manual_seed(0)
    layer = slice_(nn.Linear(6, 6), 3)
    x = torch.randn(2, 6)
    expected = layer(x)
    for count in (2, 3, 5):
        with crew_of([f"cpu:{number}" for number in range(count)]):
            assert torch.equal(layer(x), expected)
