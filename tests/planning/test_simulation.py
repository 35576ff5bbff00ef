"""Simulated steps, against closed formulas and against what no change of the hardware can do."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.batch import contiguous_runs
from evenstep.collectives import forest
from evenstep.planning import Arrangement, Link, Machine, Work, simulate
from evenstep.planning.described import BUCKET_NBYTES
from evenstep.planning.formulas import (
    best_interval_s,
    bubble,
    most_speed_up,
    partial_sums,
    ring_nbytes,
    useful_share,
)
from evenstep.planning.simulation import divided

SHARD_S = 0.25
MB = 10**6


def work(**fields):
    return Work(**{"name": "x", "examples": 64, "shards": 8, "shard_s": (SHARD_S,), **fields})


def seconds(work_, machine=None, **layout):
    return simulate(work_, machine or Machine(), Arrangement(**layout), random.Random(0)).seconds


def in_one_process(devices, **more):
    return {"devices": devices, "per_machine": devices, "per_process": devices, **more}


counts = st.integers(1, 20)


@given(counts, counts)
def test_equal_shards_take_whole_rounds(shards, devices):
    for layout in ({"devices": devices}, in_one_process(devices)):
        found = seconds(work(shards=shards), **layout)
        assert found == pytest.approx(SHARD_S * math.ceil(shards / devices))
        alone = SHARD_S * shards
        assert alone / found == pytest.approx(most_speed_up(shards, devices))


@given(st.integers(1, 6), st.integers(1, 30))
def test_a_pipeline_has_the_bubble_of_the_formula(stages, shards):
    layout = in_one_process(stages, divide="stages", stages=stages)
    one_sided = work(shards=shards, forward_share=0.5)
    found = simulate(one_sided, Machine(), Arrangement(**layout), random.Random(0))
    idle = 1 - sum(found.busy_s) / (stages * found.seconds)
    assert idle == pytest.approx(bubble(shards, stages))


@given(st.integers(2, 12), st.integers(1, 80))
def test_a_ring_sends_its_bytes_at_the_rate_of_the_slowest_link(devices, megabytes):
    link = Link(bytes_per_s=100 * MB, latency_s=0.001)
    own = work(shards=devices, gradient_nbytes=megabytes * MB, forward_share=1.0)
    found = seconds(own, Machine(network=link), devices=devices, exchange="ring")
    buckets = math.ceil(megabytes * MB / BUCKET_NBYTES)
    sent_s = ring_nbytes(megabytes * MB, devices) / link.bytes_per_s
    assert found == pytest.approx(SHARD_S + sent_s + buckets * 2 * (devices - 1) * 0.001)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_the_canonical_sum_sends_as_many_bytes_as_a_ring(processes):
    nbytes = 3 * MB  # one bucket, which begins when all is computed
    machine = Machine(network=Link(bytes_per_s=10 * MB))
    found = seconds(work(gradient_nbytes=nbytes), machine, devices=processes)
    sent_s = ring_nbytes(nbytes, processes) / machine.network.bytes_per_s
    assert found == pytest.approx(SHARD_S * 8 / processes + sent_s)


def test_a_small_sum_waits_for_two_latencies_and_a_large_one_for_four():
    machine = Machine(network=Link(latency_s=1.0))
    computed_s = SHARD_S * 4
    for nbytes, latencies in ((1000, 2), (1 * MB, 4)):
        found = seconds(work(gradient_nbytes=nbytes), machine, devices=2)
        assert found == pytest.approx(computed_s + latencies)


def test_buckets_are_sent_beside_the_backward_pass():
    nbytes = 10 * BUCKET_NBYTES
    rate = nbytes / (SHARD_S * 2 / 3) * 2  # twice as fast as the backward pass makes them
    machine = Machine(network=Link(bytes_per_s=rate))
    found = simulate(
        work(shards=2, gradient_nbytes=nbytes), machine, Arrangement(devices=2), random.Random(0)
    )
    assert found.exchanged_s == pytest.approx(BUCKET_NBYTES / rate)  # the last one: sent, returned


def test_all_machines_of_a_shared_cable_wait_for_it():
    own = work(gradient_nbytes=4 * MB)
    apart, shared = (
        seconds(own, Machine(network=Link(bytes_per_s=MB, shared=shared)), devices=4)
        for shared in (False, True)
    )
    assert shared - 0.5 == pytest.approx(4 * (apart - 0.5))


def test_owners_divide_the_update():
    own = work(update_s=1.0)
    alike, divided_ = (seconds(own, devices=4, divide=divide) for divide in ("data", "owners"))
    assert alike - divided_ == pytest.approx(0.75)


def test_a_loader_is_hidden_by_a_second_step_in_flight():
    slow, fast = work(load_s=5.0), work(load_s=0.1)
    assert seconds(slow) == pytest.approx(7.0)
    assert seconds(slow, in_flight=2) == pytest.approx(5.0)
    assert seconds(fast, in_flight=2) == pytest.approx(2.0)


def test_a_slow_device_loses_shards_to_a_fast_one():
    layout = in_one_process(2, speeds=(1.0, 0.5))
    assert seconds(work(shards=6), **layout) == pytest.approx(4 * SHARD_S)
    equal = {**layout, "speeds": ()}
    assert seconds(work(shards=6), **equal) == pytest.approx(3 * SHARD_S)


def test_an_idle_device_steals_unless_it_may_not():
    jittery = work(shards=16, shard_s=(0.1, 0.1, 0.1, 1.0))
    stolen, kept = (
        [
            simulate(
                jittery,
                Machine(),
                Arrangement(**in_one_process(4, steals=steals)),
                random.Random(seed),
            ).seconds
            for seed in range(40)
        ]
        for steals in (True, False)
    )
    assert sum(stolen) < 0.85 * sum(kept)


def test_devices_that_slow_each_other_down_do_so_while_they_compute():
    machine = Machine(slowdown=(1.0, 1.5))
    assert seconds(work(), machine, **in_one_process(2)) == pytest.approx(4 * SHARD_S * 1.5)
    assert seconds(work(), machine, **in_one_process(1)) == pytest.approx(8 * SHARD_S)
    assert seconds(work(), machine, devices=2) == pytest.approx(4 * SHARD_S)  # two machines


def test_shared_memory_needs_no_network():
    slow = Machine(local=Link(bytes_per_s=1.0), copied_bytes_per_s=1e9, shared_s=0.001)
    found = seconds(work(gradient_nbytes=MB), slow, devices=2, per_machine=2, per_process=1)
    assert found == pytest.approx(4 * SHARD_S + 3e-3)
    sockets = {"devices": 2, "per_machine": 2, "per_process": 1, "sockets": True}
    assert seconds(work(gradient_nbytes=MB), slow, **sockets) > MB


def test_slices_divide_each_shard():
    assert seconds(work(), **in_one_process(4, divide="slices")) == pytest.approx(2 * SHARD_S)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(1, 33),
    st.integers(0, 20 * MB),
    st.floats(1e5, 1e10),
    st.floats(0, 0.1),
    st.floats(1.0, 4.0),
    st.sampled_from(["data", "owners"]),
    st.sampled_from(["canonical", "ring", "sharded"]),
)
def test_better_hardware_is_never_slower(
    devices, shards, nbytes, rate, latency_s, factor, divide, exchange
):
    own = work(shards=shards, examples=64, gradient_nbytes=nbytes, update_s=0.1)
    layout = {"devices": devices, "divide": divide, "exchange": exchange}

    def with_link(**fields):
        link = Link(**{"bytes_per_s": rate, "latency_s": latency_s, **fields})
        return seconds(own, Machine(network=link), **layout)

    found = with_link()
    assert with_link(bytes_per_s=factor * rate) <= found * (1 + 1e-9)
    assert with_link(latency_s=latency_s / factor) <= found * (1 + 1e-9)
    quicker = dataclasses.replace(own, shard_s=(SHARD_S / factor,), update_s=0.1 / factor)
    link = Link(bytes_per_s=rate, latency_s=latency_s)
    assert seconds(quicker, Machine(network=link), **layout) <= found * (1 + 1e-9)
    assert found >= SHARD_S * math.ceil(shards / devices)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8),
    st.integers(1, 24),
    st.integers(1, 8),
    st.integers(0, 1000),
)
def test_no_device_is_busy_for_longer_than_the_step(times_s, shards, devices, seed):
    own = work(shards=shards, shard_s=tuple(times_s))
    arrangement = Arrangement(**in_one_process(devices))
    found = simulate(own, Machine(), arrangement, random.Random(seed))
    assert max(found.busy_s) <= found.seconds * (1 + 1e-9)
    least, most = (shards * pick(times_s) for pick in (min, max))
    assert least * (1 - 1e-9) <= sum(found.busy_s) <= most * (1 + 1e-9)
    assert found.seconds >= sum(found.busy_s) / devices * (1 - 1e-9)


@given(st.integers(1, 40), st.lists(st.floats(0.1, 5), min_size=1, max_size=9))
def test_shards_are_divided_as_evenstep_does(count, speeds):
    assert [[*run] for run in divided(count, speeds)] == contiguous_runs(range(count), speeds)


@given(st.integers(1, 12), st.integers(1, 40))
def test_partial_sums_are_those_of_the_tree(processes, shards):
    runs = divided(shards, [1.0] * processes)
    found = forest(shards, shards, tuple(runs))
    for rank, run in enumerate(runs):
        assert partial_sums(run.start, run.stop, shards) == len(found.partials_of(rank))


@given(st.floats(1, 1e3), st.floats(0, 1e3), st.floats(1e5, 1e7), st.floats(0.2, 5.0))
def test_the_best_interval_loses_least(save_s, restart_s, between_s, factor):
    best_s = best_interval_s(save_s, between_s)
    if not best_s < 0.05 * between_s:
        return  # the formula is of the first order
    best = useful_share(best_s, save_s, restart_s, between_s)
    other = useful_share(factor * best_s, save_s, restart_s, between_s)
    assert other <= best * 1.005
