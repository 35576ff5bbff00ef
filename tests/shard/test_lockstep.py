"""Shards that run side by side, and sum values over the whole batch."""

import itertools
import operator
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from evenstep.devices import as_device
from evenstep.errors import ModelError
from evenstep.shard.lockstep import DeviceTurns, Lockstep, ShardInStep

CPU = as_device("cpu:0")


def run(shards, functions, devices=1):
    """Run each function as one shard; return the value or the error of each, and the turns."""
    lockstep = Lockstep(shards)
    turns = []
    seats = [DeviceTurns(turns.append, CPU) for _ in range(devices)]
    members = [ShardInStep(lockstep, n, seats[n % devices]) for n in range(shards)]
    with ThreadPoolExecutor(shards) as crew:
        pairs = zip(members, functions, strict=True)
        found = [crew.submit(one.run, lambda f=f, one=one: f(one)) for one, f in pairs]
    return [future.exception() or future.result() for future in found], turns


@pytest.mark.parametrize("devices", [1, 2, 5])
def test_all_shards_get_the_canonical_sum(devices):
    def bring(letter):
        return lambda shard: shard.sum_over_shards("place", letter, lambda a, b: f"({a}{b})")

    found, _ = run(5, [bring(letter) for letter in "abcde"], devices)
    assert found == ["(((ab)(cd))e)"] * 5


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_values_are_in_the_order_of_the_shards_in_any_order_of_arrival(order):
    lockstep = Lockstep(4)
    found = [lockstep.bring(shard, "place", "abcd"[shard]) for shard in order]
    assert found == [None, None, None, [*"abcd"]]


def test_many_sums_one_after_the_other():
    def function(shard):
        return [shard.sum_over_shards(place, place, operator.add) for place in range(50)]

    found, _ = run(4, [function] * 4, devices=2)
    assert found == [[4 * place for place in range(50)]] * 4


def test_a_device_runs_one_shard_at_a_time():
    running, most = [], []

    def function(shard):
        for place in range(20):
            running.append(1)
            time.sleep(0.0005)  # a moment in which another shard could run
            most.append(len(running))
            running.pop()
            shard.sum_over_shards(place, 1, operator.add)

    _, turns = run(6, [function] * 6)
    assert set(most) == {1}
    ordered = sorted(turns, key=operator.itemgetter(1))
    assert all(earlier[2] <= later[1] for earlier, later in itertools.pairwise(ordered))


def test_an_error_in_one_shard_stops_the_others():
    def fail(shard):
        raise KeyError("mine")

    def wait(shard):
        return shard.sum_over_shards("place", 1, operator.add)

    found, _ = run(3, [wait, fail, wait])
    assert [found[0], found[2]] == [None, None]
    assert isinstance(found[1], KeyError)


def test_stop_ends_the_shards_that_wait():
    lockstep = Lockstep(2)
    shard = ShardInStep(lockstep, 0, DeviceTurns(lambda turn: None, CPU))
    with ThreadPoolExecutor(1) as crew:
        waits = crew.submit(shard.run, lambda: shard.sum_over_shards("place", 1, operator.add))
        lockstep.stop()
        assert waits.result() is None


@pytest.mark.parametrize(
    "other", [lambda shard: None, lambda shard: shard.sum_over_shards("elsewhere", 1, max)]
)
def test_shards_at_different_sums_are_refused_instead_of_deadlocking(other):
    found, _ = run(3, [lambda shard: shard.sum_over_shards("layer 1", 1, max)] * 2 + [other])
    errors = [error for error in found if isinstance(error, Exception)]
    assert len(errors) == 1
    with pytest.raises(ModelError, match=r"layer 1 was reached by shards 0, 1.*batch_norm='shard'"):
        raise errors[0]
