"""Every sentence about a trace appears where its cause is, and only there."""

import dataclasses

import pytest

from evenstep.cli.traces.advice import findings
from evenstep.profiling.accounting import PARTS, together
from traces import HandTrace


def trace_of(*devices, steps=4, load=None, **step):
    """A trace of equal steps, whose load (if any) is the wait."""
    trace = HandTrace(*devices)
    shards = step.pop("shards")
    for _ in range(steps):
        if load is not None:
            trace.load(load)
        trace.add(*shards, **step)
    return trace


def two(*shards, **step):
    return trace_of("cpu:0", "cpu:1", shards=shards, **step)


def said(trace):
    """Return the texts of the findings by cause."""
    found = findings(trace.account)
    texts = {finding.cause: finding.text for finding in found}
    assert len(texts) == len(found)
    return texts


GOOD = ([10, 10], [10, 10])


def test_nothing_is_lost():
    texts = said(two(*GOOD, update=0.2))
    assert texts == {"none": "devices compute 99% of the time: nothing is worth fixing"}
    text = said(two(*GOOD, update=1, wait=1, load=1, sums=[0.8, 0.8]))
    assert text == {
        "none": "devices compute 87% of the time: no loss takes 5%, so nothing is worth fixing"
    }
    text = said(trace_of("cpu:0", shards=[[10, 10]], update=0.2))["none"]
    assert text.startswith("cpu:0 computes 99% of the time")


# --- data


def test_loading_that_in_flight_would_hide():
    assert said(two(*GOOD, wait=9, load=9, update=0.2)) == {
        "data": "devices wait for data 31% of the time: loading takes 9.0 ms a step and one step's "
        "work 20.2 ms. max_in_flight=2 overlaps them"
    }


def in_flight(*, load, wait, longest=None):
    """Steps whose data are loaded while the step before is computed."""
    trace = HandTrace("cpu:0", "cpu:1")
    for number in range(6):
        took = longest if longest and number == 3 else load
        trace.load(took, at=trace.now + wait - took)
        trace.add(*GOOD, wait=wait, update=0.2)
    return trace


DATA = {
    "takes longer": (
        lambda: two(*GOOD, wait=40, load=40, update=0.2),
        "loading takes 40.0 ms a step, longer than one step's work, 20.2 ms",
        "max_in_flight=2 overlaps them, but then loading sets the pace",
    ),
    "overlaps, takes longer": (
        lambda: in_flight(load=30, wait=10),
        "longer than one step's work, 20.2 ms, although the two overlap",
        "workers of the Loader",
    ),
    "uneven": (
        lambda: in_flight(load=5, wait=2, longest=60),
        "the longest load took 60.0 ms. More steps in flight (max_in_flight=...) bridge such",
    ),
    "overlaps in part": (lambda: in_flight(load=10, wait=5), "the two overlap in part"),
    "not the reason": (lambda: two(*GOOD, wait=9, load=2), "loading explains only 2.0 ms"),
    "not known": (lambda: two(*GOOD, wait=9), "9.0 ms a step, and the trace does not show the"),
}
OTHERS = {
    "slow device": (
        lambda: two([10, 10], [15, 15], update=0.2),
        "devices wait for each other 17% of the time",
        "cpu:1 takes 15.0 ms a shard, cpu:0 10.0 ms",
        "shards=8, a different experiment",
    ),
    "few shards": (
        lambda: trace_of("cpu:0", "cpu:1", "cpu:2", shards=[[10], [10], []], update=0.2),
        "2 shards for 3 devices, so 1 of them can't have one. shards=3",
    ),
    "no shard": (lambda: two([10, 10], [], update=0.2), "cpu:1 computed no shard"),
    "odd shards": (
        lambda: two([10, 10], [10], update=0.2),
        "3 shards over 2 devices give some 2 and others 1. shards=4",
    ),
    "between tasks": (
        lambda: two(*GOOD, update=0.2, idle=5),
        "the time is lost between tasks",
    ),
    "alone": (
        lambda: trace_of("cpu:0", shards=[[10]], update=0.2, idle=5),
        "cpu:0 is idle 33% of the time inside steps",
    ),
}


@pytest.mark.parametrize(
    ("cause", "case"), [*(("data", one) for one in DATA), *(("others", one) for one in OTHERS)]
)
def test_a_loss_is_explained(cause, case):
    make, *parts = (DATA if cause == "data" else OTHERS)[case]
    text = said(make())[cause]
    for part in parts:
        assert part in text
    assert ("explains" in text) == (case == "not the reason")
    if case == "overlaps, takes longer":
        assert "in flight" not in text


def test_shards_that_vary():
    trace = HandTrace("cpu:0", "cpu:1")
    for number in range(8):
        takes = ([10, 10], [10, 40]) if number % 2 else ([10, 40], [10, 10])
        trace.add(*takes, update=0.2)
    text = said(trace)["others"]
    assert "half of them take 10.0 ms or more, one in twenty 40.0 ms or more" in text


def test_waiting_for_the_update_is_the_updates():
    texts = said(two(*GOOD, update=5))
    assert list(texts) == ["update"]
    assert texts["update"].startswith(
        "updating takes 20% of the time, 5.0 ms a step, on cpu:0 while the others wait"
    )


# --- sum and update


def test_an_update_on_all_devices_lets_none_wait():
    texts = said(two(*GOOD, update=5, home=("cpu:0", "cpu:1")))
    assert list(texts) == ["update"]
    assert "on cpu:0 and cpu:1: a larger" in texts["update"]


def test_summing():
    texts = said(two(*GOOD, update=0.2, sums=[4, 4]))
    assert list(texts) == ["sum"]
    assert texts["sum"].startswith(
        "devices sum gradients 20% of the time (up to 3 sums a step): fewer shards"
    )


# --- remarks


def test_short_shards():
    text = said(two([0.4] * 9, [0.4] * 9, update=0.01))["short"]
    assert text.startswith("half of the shards take less than 0.40 ms")


def test_stolen_shards():
    texts = said(two([10, 10], [10, (10, "stolen")], update=0.2))
    assert "25% of the shards were stolen, most of them by cpu:1" in texts["stolen"]
    assert "none" in texts  # nothing is lost by it
    assert "stolen" not in said(two(*GOOD))


def test_gpus_come_with_a_word_on_their_times():
    texts = said(trace_of("cuda:0", "cuda:1", shards=([0.1], [0.3]), update=2))
    assert "the times of cuda:0 and cuda:1 were measured in the threads" in texts["gpu"]
    assert "kernels of the shards" in texts["update"]
    assert "short" not in texts  # a launch says nothing of how long the kernels take


def test_launches_do_not_say_which_gpu_is_slow():
    texts = said(trace_of("cuda:0", "cuda:1", shards=([2], [6]), update=0.1))
    assert "a shard, cuda" not in texts["others"]


# --- all together


def test_the_largest_loss_comes_first():
    trace = two([20, 20], [30, 30], wait=40, load=40, update=12, sums=[6, 6])
    found = findings(trace.account)
    assert [finding.cause for finding in found] == ["data", "update", "others", "sum"]
    shares = [finding.share for finding in found]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("part", PARTS)
def test_shares_of_losses_are_those_of_the_table(part):
    account = two([20, 20], [30, 30], wait=40, load=40, update=12, sums=[6, 6]).account
    shares = together(account.devices).shares
    found = {finding.cause: finding.share for finding in findings(account)}
    lost = found["others"] + found["update"]
    expected = {
        "compute": shares["compute"],
        "wait_data": found["data"],
        "sum": found["sum"],
        # The wait for another device's update is part of the update.
        "wait_others": lost - shares["update"],
        "update": lost - shares["wait_others"],
    }
    assert expected[part] == pytest.approx(shares[part])


def test_a_trace_of_no_time_is_no_reason_to_fail():
    account = HandTrace("cpu:0", "cpu:1").add([0], [0], update=0).account
    assert [finding.cause for finding in findings(account)] == ["short"]
    without = dataclasses.replace(account, median_shard_s=None, late_shard_s=None, shard_s={})
    assert [finding.cause for finding in findings(without)] == ["none"]


# --- stages of a network


def test_equal_stages_have_a_bubble():
    trace = HandTrace("cpu:0", "cpu:1").add_staged(7, (1, 2), (1, 2)).add_staged(7, (1, 2), (1, 2))
    assert trace.account.stage_s == pytest.approx({0: 3e-3, 1: 3e-3})
    assert [device.shards for device in trace.account.devices] == [14, 14]
    assert said(trace)["others"] == (
        "devices wait for each other 50% of the time: while 2 stages with 7 shards fill and empty, "
        "equal stages are idle 12% of the time (the bubble). More shards (shards=14, a "
        "different experiment) make it smaller"
    )


def test_a_slow_stage_has_its_number():
    trace = HandTrace("cpu:0", "cpu:1").add_staged(3, (1, 2), (2, 4))
    assert said(trace)["others"].endswith(
        "are idle 25% of the time (the bubble). Stage 1 takes 6.0 ms a shard, stage 0 3.0 ms, and "
        "the slowest sets the pace: move layers from stage 1 to stage 0 (Stages(...)), or have the "
        "times balanced (Stages('balanced:time'))"
    )
