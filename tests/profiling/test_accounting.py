"""Where the time went: parts that add up, and shares computed by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import InputError
from evenstep.profiling.accounting import Account, DeviceShares, together, whole_percents
from evenstep.profiling.reader import account_of_trace, read_trace
from evenstep.profiling.trace import Span
from traces import HandTrace

seconds = st.floats(min_value=0, max_value=1e3)
CATEGORIES = ("compute", "sum", "update", "evaluate", "copy", "open")


def device(**parts):
    zero = dict.fromkeys(("compute_s", "sum_s", "update_s", "wait_data_s", "wait_others_s"), 0.0)
    return DeviceShares(**{"device": "cpu:0", "shards": 0, "stolen": 0, **zero, **parts})


# --- step by step


def test_parts_by_hand():
    account = Account(["cpu:0", "cpu:1"])
    account.add(0, "compute", 4.0, shards=1)
    account.add(1, "compute", 2.0, shards=1, stolen=1)
    account.add_step(10.0, 13.0, 20.0)
    account.add(0, "sum", 0.5)  # inside the shard's four seconds
    account.add(0, "update", 1.0)
    account.add(0, "evaluate", 100.0)
    first, second = account.shares()
    assert first == device(
        compute_s=3.5, sum_s=0.5, update_s=1.0, wait_data_s=3.0, wait_others_s=2.0, shards=1
    )
    assert second == device(
        device="cpu:1", compute_s=2.0, wait_data_s=3.0, wait_others_s=5.0, shards=1, stolen=1
    )
    assert first.wall_s == second.wall_s == account.wall_s == 10.0
    assert first.shares == {
        "compute": 0.35,
        "wait_data": 0.3,
        "wait_others": 0.2,
        "sum": 0.05,
        "update": 0.1,
    }


def test_before_the_first_step_all_is_nothing():
    (shares,) = Account(["cpu:0"]).shares()
    assert shares == device()
    assert set(shares.shares.values()) == {0.0}
    assert shares.wall_s == 0


def test_work_of_a_step_that_has_not_ended_counts_no_time():
    account = Account(["cpu:0"])
    account.add(0, "compute", 4.0, shards=1)
    assert account.shares() == (device(shards=1),)


def test_the_time_between_steps_belongs_to_none():
    account = Account(["cpu:0"])
    account.add_step(0.0, 1.0, 5.0)
    account.add_step(100.0, 102.0, 105.0)
    assert (account.wall_s, account.wait_data_s, account.steps) == (10.0, 3.0, 2)


def test_what_steps_in_flight_share_counts_once():
    account = Account(["cpu:0"])
    account.add_step(0.0, 1.0, 5.0)
    account.add_step(2.0, 4.0, 8.0)  # its data came while the first one was computed
    account.add_step(3.0, 9.0, 10.0)  # its data came a second after the second one
    assert (account.wall_s, account.wait_data_s) == (10.0, 2.0)


def test_a_sum_inside_an_update():
    account = Account(["cpu:0"])
    account.add(0, "sum", 1.0)
    account.add(0, "update", 3.0)
    account.add_step(0.0, 0.0, 3.0)
    assert account.shares() == (device(sum_s=1.0, update_s=2.0),)


def test_jitter_takes_from_waiting_first():
    account = Account(["cpu:0"])
    account.add_step(0.0, 1.0, 5.0)
    account.add(0, "compute", 4.5)
    (shares,) = account.shares()
    assert shares == device(compute_s=4.5, wait_data_s=0.5)


@given(
    spans=st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(CATEGORIES), seconds, st.booleans(), st.booleans()
        )
    ),
    steps=st.lists(st.tuples(seconds, seconds, seconds)),
)
def test_parts_always_add_up(spans, steps):
    account = Account(["a", "b", "c"])
    for lane, category, took, shard, stolen in spans:
        account.add(lane, category, took, shards=shard, stolen=shard and stolen)
    for times in steps:
        account.add_step(*times)
    for shares in account.shares():
        assert min(shares.seconds.values()) >= 0
        assert shares.wall_s == pytest.approx(account.wall_s, rel=1e-9, abs=1e-9)
        assert sum(shares.shares.values()) == pytest.approx(1 if shares.wall_s else 0)
        assert 0 <= shares.stolen <= shares.shards


@given(
    steps=st.lists(
        st.tuples(seconds, st.lists(seconds, min_size=3, max_size=3), seconds, seconds), min_size=1
    )
)
def test_real_steps_lose_nothing(steps):
    """Nothing is clamped where the spans lie inside their steps."""
    account = Account(["a", "b", "c"])
    now = 0.0
    for wait, computes, update, idle in steps:
        began, now = now + wait, now + wait + max(computes) + update + idle
        for lane, took in enumerate(computes):
            account.add(lane, "compute", took, shards=1)
        account.add(0, "update", update)
        account.add_step(began - wait, began, now)
    for lane, shares in enumerate(account.shares()):
        close = {"rel": 1e-9, "abs": 1e-6}
        assert shares.compute_s == pytest.approx(sum(step[1][lane] for step in steps), **close)
        assert shares.wait_data_s == pytest.approx(sum(step[0] for step in steps), **close)
        assert shares.shards == len(steps)


def test_together_is_the_mean_and_the_sum():
    whole = together([device(compute_s=4.0, shards=3), device(sum_s=2.0, shards=1, stolen=1)])
    assert whole == device(device="all", compute_s=2.0, sum_s=1.0, shards=4, stolen=1)


# --- percentages


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda values: sum(values) > 0))
def test_percents_add_up_to_100_and_are_near(values):
    shares = [value / sum(values) for value in values]
    percents = whole_percents(shares)
    assert sum(percents) == 100
    assert all(abs(p - 100 * share) < 1 + 1e-9 for p, share in zip(percents, shares, strict=True))


def test_percents_by_hand():
    assert whole_percents([1 / 3, 1 / 3, 1 / 3]) == [34, 33, 33]
    assert whole_percents([0.005, 0.995]) == [1, 99]
    assert whole_percents([0.0, 0.0]) == [0, 0]


# --- from a trace


def hand_trace():
    trace = HandTrace("cpu:0", "cpu:1")
    trace.load(3)
    trace.add([4, 4], [(6, "stolen")], wait=3, sums=[1], update=2)
    trace.pause(20)
    trace.load(5)
    return trace.add([4, 4], [6], wait=5, sums=[1], update=2)


def ms(value):
    return pytest.approx(value * 1e-3, abs=1e-8)


def test_a_trace_by_hand():
    account = hand_trace().account
    first, second = account.devices
    assert (first.device, second.device) == ("cpu:0", "cpu:1")
    assert [first.compute_s, first.sum_s, first.update_s] == [ms(14), ms(2), ms(4)]
    assert [first.wait_data_s, first.wait_others_s] == [ms(8), ms(0)]
    assert [second.compute_s, second.sum_s, second.update_s] == [ms(12), ms(0), ms(0)]
    assert [second.wait_data_s, second.wait_others_s] == [ms(8), ms(8)]
    assert (first.shards, first.stolen, second.shards, second.stolen) == (4, 0, 2, 1)
    assert (account.steps, account.shards, account.dropped) == (2, 3, 0)
    assert (account.wall_s, account.wait_data_s, account.between_s) == (ms(28), ms(8), ms(20))
    assert (account.updating_s, account.copy_s) == (ms(4), 0)
    assert account.shard_s == {"cpu:0": ms(4), "cpu:1": ms(6)}
    assert (account.median_shard_s, account.late_shard_s) == (ms(4), ms(6))
    assert (account.loads, account.load_s, account.longest_load_s) == (2, ms(8), ms(5))
    assert account.overlapped_load_s == ms(0)


def test_a_trace_and_the_running_account_agree():
    account = Account(["cpu:0", "cpu:1"])
    for opened, began, ended in ((0, 3, 13), (33, 38, 48)):
        account.add(0, "compute", 8)
        account.add(1, "compute", 6)
        account.add(0, "sum", 1)
        account.add(0, "update", 2)
        account.add_step(opened, began, ended)
    for running, read in zip(account.shares(), hand_trace().account.devices, strict=True):
        assert read.shares == pytest.approx(running.shares)


def test_loads_and_copies_beside_steps():
    trace = HandTrace("cpu:0")
    trace.load(4, at=8)  # two of its four ms lie in the step
    trace.trace.add(Span(1, "copy", "copy", 0.001, 0.004, None))
    account = trace.add([9], update=1).account
    assert account.overlapped_load_s == ms(2)
    assert account.copy_s == ms(3)


def test_a_device_without_work_waits():
    account = HandTrace("cpu:0", "cpu:1").add([8], [], update=2, wait=10).account
    assert account.devices[1].shares["wait_others"] == pytest.approx(0.5)
    assert account.devices[1].shares["wait_data"] == pytest.approx(0.5)
    assert account.shard_s == {"cpu:0": ms(8)}


def test_work_outside_steps_does_not_count():
    trace = HandTrace("cpu:0")
    trace.span("cpu:0", "shard 0", "compute", 0, 50, step=0, shard=0)  # of a step that was given up
    trace.pause(60)
    trace.add([8], update=2)
    trace.span("cpu:0", "evaluate 0", "evaluate", trace.now + 5, 50)
    (shares,) = trace.account.devices
    assert (shares.compute_s, shares.shards, shares.wall_s) == (ms(8), 1, ms(10))


def test_a_trace_that_dropped_spans_counts_whole_steps_only():
    trace = HandTrace("cpu:0", limit=10)  # four spans a step: half of one is left of the third
    for _ in range(5):
        trace.add([4], wait=5, update=1)
    account = trace.account
    assert (account.steps, account.dropped) == (2, 10)
    (shares,) = account.devices
    assert (shares.compute_s, shares.wait_data_s, shares.update_s) == (ms(8), ms(10), ms(2))
    assert shares.shards == 2


def test_a_trace_without_a_whole_step_says_so():
    trace = HandTrace("cpu:0", limit=3).add([4]).add([4], wait=1)
    with pytest.raises(InputError, match="contains no complete step"):
        _ = trace.account


def test_a_file_and_its_document_are_the_same(tmp_path):
    trace = hand_trace()
    trace.trace.save(tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json")[0] == trace.account


def test_a_trace_without_steps_says_so():
    trace = HandTrace("cpu:0")
    with pytest.raises(InputError, match="contains no training steps"):
        _ = trace.account
    trace.span("cpu:0", "mm", "compute", 0, 5)
    with pytest.raises(InputError, match="contains no training steps"):
        _ = trace.account


EVENT = {"ph": "X", "name": "", "cat": "step", "pid": 1, "tid": 1, "ts": 0, "dur": 5, "args": {}}
STEPS = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "steps"}}


def document(*events, program="evenstep", dropped=0):
    return {
        "traceEvents": [*events],
        "otherData": {"program": program, "dropped_spans": dropped},
    }


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ([], "not a trace written by evenstep"),
        (None, "not a trace written by evenstep"),
        ({}, "'otherData' is missing"),
        ({"traceEvents": []}, "'otherData' is missing"),
        ({**document(), "traceEvents": 7}, "not a trace written by evenstep"),
        (document(program="torch"), "written by 'torch'"),
        (document(dropped="x"), "not a trace written by evenstep"),
        (document(), "contains no training steps"),
        (document(EVENT), "is missing"),
        (document(STEPS, EVENT), "no row of a device"),
        (document(STEPS, 7), "not a trace written by evenstep"),
        (document(STEPS, {**EVENT, "ts": float("nan")}), "a span of 5.0 us at nan us"),
        (document(STEPS, {**EVENT, "ts": 10**400}), "not a trace written by evenstep"),
        (document(STEPS, {**EVENT, "dur": float("inf")}), "a span of inf us"),
        (document(STEPS, {**EVENT, "dur": -1}), "a span of -1.0 us"),
        (document(STEPS, {**EVENT, "tid": [1]}), "not a trace written by evenstep"),
        (document(STEPS, {**EVENT, "args": 3}), "not a trace written by evenstep"),
        (document({**STEPS, "args": {}}), "'name' is missing"),
    ],
)
def test_foreign_documents_are_refused(document, part):
    with pytest.raises(InputError) as caught:
        account_of_trace(document)
    assert part in str(caught.value)
    assert "give a file that `Trainer.trace.save` wrote" in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([*EVENT]), json_values)),
    st.lists(st.integers(0, 30)),
)
def test_a_damaged_trace_is_read_or_refused(changes, lost):
    document = json.loads(json.dumps(hand_trace().trace.to_json()))
    events = document["traceEvents"]
    for place, key, value in changes:
        events[place % len(events)][key] = value
    for place in lost:
        if events:
            del events[place % len(events)]
    try:
        account = account_of_trace(document)
    except InputError:
        return
    for shares in account.devices:
        assert shares.wall_s == pytest.approx(account.wall_s, rel=1e-6, abs=1e-6)
