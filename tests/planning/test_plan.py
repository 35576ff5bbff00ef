"""Plans: what binds, what they say, what they refuse, and how long they take."""

import dataclasses
import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evenstep
from evenstep.errors import InputError
from evenstep.planning import Arrangement, Link, Machine, Work, parse_network, predict
from evenstep.planning.prediction import BOUND, PARTS
from traces import HandTrace

MB = 10**6


def work(**fields):
    fields = {"name": "x", "examples": 64, "shards": 8, "shard_s": (0.01,), **fields}
    return Work(**fields)


def one_process(devices, **more):
    return Arrangement(devices=devices, per_machine=devices, per_process=devices, **more)


BINDING = {
    "V": (work(), Machine(), one_process(3)),
    "memory": (work(), Machine(slowdown=(1, 1.9)), one_process(2)),
    "network": (
        work(gradient_nbytes=50 * MB),
        Machine(network=Link(bytes_per_s=MB)),
        Arrangement(devices=2),
    ),
    "bubbles": (work(), Machine(), one_process(4, divide="stages", stages=4)),
    "stragglers": (work(shard_s=(0.01,) * 7 + (0.2,)), Machine(), Arrangement(devices=8)),
    "loader": (work(load_s=1.0), Machine(), one_process(4, in_flight=2)),
    "slices": (
        work(slices=4, sliced_s=0.004, meetings=7),
        Machine(meeting_s=1e-4),
        one_process(2, divide="slices"),
    ),
    "update": (work(update_s=1.0), Machine(), one_process(4)),
    "compute": (work(), Machine(), one_process(4)),
}


@pytest.mark.parametrize("what", BOUND)
def test_it_says_what_binds(what):
    found = predict(*BINDING[what])
    assert found.binds == what
    assert BOUND[what] in found.reasons[-1]
    assert found.least <= found.examples_per_s <= found.most
    assert sum(found.shares[part] for part in PARTS) == pytest.approx(1, abs=0.01)


def test_the_reasons_have_the_numbers():
    found = predict(work(), Machine(), one_process(3))
    assert found.reasons[0] == "V = 8 on 3 devices: at most 2.67 times"
    assert found.speed_up == pytest.approx(8 / 3)
    idle = predict(work(), Machine(), Arrangement(devices=10))
    assert "2 get no work" in idle.reasons[0]
    three = predict(work(gradient_nbytes=MB), Machine(), Arrangement(devices=3))
    assert any("up to 2 partial sums" in text for text in three.reasons)


def test_memory_counts_what_a_layout_divides():
    adam = work(gradient_nbytes=100 * MB, state_nbytes=200 * MB, activation_nbytes=7 * MB)
    alone = predict(adam, Machine(), Arrangement()).memory_nbytes
    assert alone == (100 + 100 + 200 + 100 + 7) * MB
    owned = predict(adam, Machine(), Arrangement(devices=4, divide="owners")).memory_nbytes
    assert owned == (100 + 25 + 50 + 100 + 7) * MB
    small = Machine(has_own_memory=True, memory_nbytes=300 * MB)
    assert predict(adam, small, Arrangement()).fits is False
    assert predict(adam, small, one_process(4, divide="stages", stages=4)).fits is True


def test_what_was_not_measured_is_said_and_widens_the_range():
    known = predict(work(), Machine(slowdown=(1.0, 1.0)), one_process(2))
    unknown = predict(work(), Machine(), one_process(2))
    assert not known.unseen
    assert "not measured" in unknown.unseen[0]
    assert unknown.most / unknown.least > known.most / known.least
    gpu = predict(work(device="cuda"), Machine(), Arrangement(devices=2))
    assert any("cuda" in text for text in gpu.unseen)


def test_shards_that_vary_widen_the_range():
    """Without a layout to be wrong about, only the measured spread is left."""
    steady = predict(work(), Machine(), Arrangement())
    assert steady.least == steady.examples_per_s == steady.most
    varying = predict(work(shard_s=(0.01, 0.01, 0.03)), Machine(), Arrangement())
    assert varying.least < varying.examples_per_s < varying.most


def test_slices_say_what_they_gain_and_what_nobody_measured():
    own = work(slices=4, sliced_s=0.006, meetings=10, gradient_nbytes=MB, activation_nbytes=8 * MB)
    found = predict(own, Machine(meeting_s=1e-5), one_process(3, divide="slices"))
    # 1 / (0.4 + 0.6 * 2 / 4)
    assert found.reasons[0] == (
        "S = 4 on 3 devices of a process, 60% of a shard in slices: at most 1.43 times"
    )
    assert found.reasons[1] == "the devices meet 80 times in a step: 0.8 ms"
    assert found.memory_nbytes == (3 * MB + 8 * MB) / 3 // 1 + 1  # they share one shard
    unknown = predict(own, Machine(), one_process(3, divide="slices"))
    assert any("how long devices take to meet" in text for text in unknown.unseen)


def test_a_slow_start_is_said_where_it_counts():
    """Of 10 segments a round trip of 40 ms, 8 doublings to the 5 MB that fit into it."""
    far = Machine(network=Link(bytes_per_s=1e9 / 8, latency_s=0.020))
    slow = predict(work(shard_s=(0.1,), gradient_nbytes=50 * MB), far, Arrangement(devices=2))
    expected_ms = 40 * math.log2(125e6 * 0.040 / 14_600)
    assert any(f"up to {expected_ms:.3g} ms of a step" in text for text in slow.unseen)
    for shard_s, latency_s in ((0.01, 0.020), (0.1, 10e-6)):  # no pause; no distance
        near = Machine(network=Link(bytes_per_s=1e9 / 8, latency_s=latency_s))
        one = work(shard_s=(shard_s,), gradient_nbytes=50 * MB)
        found = predict(one, near, Arrangement(devices=2))
        assert not any("TCP" in text for text in found.unseen)


def test_a_stage_holds_at_most_a_whole_shard():
    """Stage s of S holds S - s shards of its part of the network: stage 0 most, S of 1/S."""
    own = work(activation_nbytes=40 * MB, gradient_nbytes=8 * MB)
    gpus = Machine(has_own_memory=True)
    found = predict(own, gpus, one_process(4, divide="stages", stages=4))
    assert found.memory_nbytes == (2 + 2 + 2 + 40) * MB  # values, their sum, a shard's, and 4 / 4


def test_more_devices_pay_until_the_network_is_full():
    own = work(shards=64, gradient_nbytes=MB)
    slow = evenstep.plan(own, devices=(1, 2, 4, 8, 16, 32), network="100Mbit,50us")
    fast = evenstep.plan(own, devices=(1, 2, 4, 8, 16, 32), network="100Gbit,5us")
    assert slow.pays_until < fast.pays_until == 32


def test_a_better_v_is_advised():
    found = evenstep.plan(work(), devices=(1, 16), per_machine=16)
    assert any("V = 16 would be 2.00 times as fast" in text for text in found.advice)
    costly = work(fixed_s=0.009)
    found = evenstep.plan(costly, devices=(1, 2), per_machine=2)
    assert any("V = 2 would be" in text for text in found.advice)


def test_other_shards_and_batches_are_derived_from_the_measured_ones():
    found = evenstep.plan(work(fixed_s=0.002), devices=(1,), shards=16, batch_size=256)
    assert found.work.usual_s == pytest.approx(0.002 + 0.008 * 2)
    assert any("V = 8 with batches of 64 was measured" in text for text in found.unseen)


def test_a_plan_is_json():
    found = evenstep.plan(work(), devices=(1, 3), per_machine=4)
    read = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert read["predictions"][1]["arrangement"]["devices"] == 3
    assert read["machine"]["network"]["bytes_per_s"] is None


def test_a_plan_for_a_thousand_devices_takes_seconds():
    own = work(examples=32_768, shards=1024, shard_s=(0.01, 0.011), gradient_nbytes=45 * MB)
    began_s = time.process_time()
    found = evenstep.plan(own, devices=(1, 1000), network="100Gbit")
    assert time.process_time() - began_s < 10
    assert 1 < found.predictions[1].speed_up <= 1024 / 2


@given(st.floats(0.01, 999), st.sampled_from("kMG"), st.integers(0, 999))
def test_networks_are_read_as_they_are_written(rate, prefix, latency_us):
    bits = rate * {"k": 1e3, "M": 1e6, "G": 1e9}[prefix]
    if bits < 1e4:
        return
    link = parse_network(f"{rate:.10f}{prefix}bit,{latency_us}us")
    assert 0.9 * bits / 8 < link.bytes_per_s < bits / 8
    assert link.latency_s == pytest.approx(latency_us * 1e-6)
    assert parse_network(f"{rate:.10f}{prefix}bit,1ms,shared").shared


NETWORKS = [
    "",
    "fast",
    "1",
    "-1Gbit",
    "0Gbit",
    "1e9Gbit",
    "nanGbit",
    "1Gbit,",
    "1Gbit,5",
    "1Gbit,1h",
]
NETWORKS += ["1bit", "9" * 99 + "Gbit", "10000Tbit", "1Gbit,11s", "1Gbit,shared,loud", "∞bit"]


@pytest.mark.parametrize("text", NETWORKS)
def test_absurd_networks_are_refused(text):
    with pytest.raises(InputError, match="give bits or bytes a second") as refused:
        parse_network(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": ()}, "give numbers from 1"),
        ({"devices": (0,)}, "give numbers from 1"),
        ({"devices": (10**9,)}, "give numbers from 1"),
        ({"devices": (2,)}, "no network between them"),
        ({"devices": (1,), "shards": 65}, "at most one shard for"),
        ({"devices": (3,), "divide": "stages", "stages": 2, "per_machine": 4}, "a multiple of 2"),
        ({"devices": (4,), "divide": "slices", "per_machine": 4}, "no layer of the work is cut"),
        (
            {"devices": (4,), "divide": "slices", "per_machine": 4, "in_flight": 2},
            "slices and 2 steps in flight",
        ),
        ({"devices": (2,), "per_machine": 2, "per_process": 0, "in_flight": 0}, "no device"),
        ({"devices": (2,), "per_machine": 2, "speeds": (1.0,)}, "give each device one"),
        (
            {
                "devices": (4,),
                "per_machine": 1,
                "divide": "stages",
                "stages": 2,
                "network": "1Gbit",
            },
            "devices of one process",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        evenstep.plan(work(), **arguments)


def test_a_plan_starts_from_one_step(tmp_path):
    trace = HandTrace("cpu:0")
    for _ in range(4):
        trace.add([10.0, 10.0], update=4.0)
    trace.trace.facts["training"] = {"examples": 8, "gradient_nbytes": 100}
    trace.trace.save(tmp_path / "one.trace")
    found = evenstep.plan(trace=tmp_path / "one.trace", devices=(2,), per_machine=2)
    assert found.predictions[0].step_s == pytest.approx(0.014)
    assert any("which a trace does not hold" in text for text in found.unseen)
    for both in ({}, {"work": work(), "trace": tmp_path / "one.trace"}):
        with pytest.raises(InputError, match="either work= or trace="):
            evenstep.plan(**both)


@pytest.mark.parametrize(
    "fields",
    [
        {"shard_s": ()},
        {"shard_s": (float("nan"),)},
        {"shard_s": (float("inf"),)},
        {"shard_s": (0.0,)},
        {"shard_s": (-1.0,)},
        {"examples": 0},
        {"shards": 0},
    ],
)
def test_a_work_of_nothing_is_refused(fields):
    with pytest.raises(InputError):
        work(**fields)
    with pytest.raises(InputError):
        dataclasses.replace(work(), **fields)
