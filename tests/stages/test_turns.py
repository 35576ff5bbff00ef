"""The turns of shards on the stages of a network: the order, without threads, and the waiting."""

import functools
import heapq
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.shard.lockstep import StoppedError
from evenstep.stages.turns import Place, StagedShards, TurnOrder, Turns


def simulate(stages, shards, seconds):
    """Take shards through the stages; return the visits, in order, and when the last one ended.

    `seconds(shard, stage, backward)` is how long a visit takes. As many shards as there are stages
    are under way, as in the executor.
    """
    order, visits, ends, now = TurnOrder(stages), [], [], 0
    waiting, place = list(range(shards)), {}

    def begin():
        for shard in order.begin():
            stage, backward = place[shard]
            assert order.running[stage] == shard
            assert all(len(held) <= stages - number for number, held in enumerate(order.holding))
            visits.append((now, stage, shard, backward))
            heapq.heappush(ends, (now + seconds(shard, stage, backward), shard))

    def ask(shard, stage, backward):
        place[shard] = stage, backward
        order.ask(shard, stage, backward=backward)

    for _ in range(min(stages, shards)):
        ask(waiting.pop(0), 0, False)
    begin()
    while ends:
        now, shard = heapq.heappop(ends)
        stage, backward = place[shard]
        if not backward and stage == stages - 1:  # its backward pass follows at once
            place[shard] = stage, True
            visits.append((now, stage, shard, True))
            heapq.heappush(ends, (now + seconds(shard, stage, True), shard))
            continue
        if backward and stage == 0:
            order.end(shard)
            if waiting:
                ask(waiting.pop(0), 0, False)
        else:
            order.leave(shard, stage, holds=not backward)
            ask(shard, stage - 1 if backward else stage + 1, backward)
        begin()
    return visits, now


@given(stages=st.integers(1, 6), shards=st.integers(1, 20), seed=st.integers(0, 9))
def test_every_shard_visits_every_stage_both_ways_however_long_that_takes(stages, shards, seed):
    draw = random.Random(seed)
    visits, _ = simulate(stages, shards, lambda *_: draw.randint(1, 9))
    for shard in range(shards):
        ways = [(stage, backward) for _, stage, own, backward in visits if own == shard]
        there = [(stage, False) for stage in range(stages)]
        assert ways == there + [(stage, True) for stage in reversed(range(stages))]


@given(stages=st.integers(1, 6), shards=st.integers(1, 20), backward=st.integers(1, 3))
def test_equal_stages_are_idle_as_long_as_theory_says(stages, shards, backward):
    _, seconds = simulate(stages, shards, lambda shard, stage, back: backward if back else 1)
    least = min(stages, shards)  # with fewer shards than stages the pipeline never fills
    assert seconds == (shards + stages - 1) * (1 + backward) or shards < stages
    assert seconds >= (shards + least - 1) * (1 + backward)


def test_a_stage_goes_backward_before_it_goes_forward_and_takes_early_shards_first():
    order = TurnOrder(3)
    order.ask(4, 0, backward=False)
    assert order.begin() == [4]
    for shard, backward in ((3, False), (2, True), (1, True), (0, False)):
        order.ask(shard, 0, backward=backward)
    assert order.begin() == []
    seen = []
    shard = 4
    for _ in range(4):
        order.end(shard)
        (shard,) = order.begin()
        seen.append(shard)
    assert seen == [1, 2, 0, 3]


def test_a_stage_holds_no_more_activations_than_its_distance_from_the_end():
    order = TurnOrder(2)
    for shard in (0, 1):
        order.ask(shard, 1, backward=False)
    assert order.begin() == [0]
    order.leave(0, 1, holds=True)
    assert order.begin() == []  # shard 0 is past stage 1, and not done there
    order.ask(0, 1, backward=True)
    assert order.begin() == [0]
    order.leave(0, 1, holds=False)
    assert order.begin() == [1]


def run(turns, ways):
    """Take each shard along its way in a thread; return what each thread ended with."""

    def take(shard):
        before = None
        for place in ways[shard]:
            turns.move(shard, before, place, holds=not place.backward)
            before = place
        turns.end(shard)

    with ThreadPoolExecutor(len(ways)) as crew:
        return [future.exception() for future in [crew.submit(take, n) for n in range(len(ways))]]


def test_threads_take_turns_until_all_shards_are_done():
    way = [Place(0, False), Place(1, False), Place(1, True), Place(0, True)]
    turns = Turns(2)
    assert run(turns, [[*way[:2], way[3]]] * 2) == [None, None]
    assert turns.order.running == [None, None]
    assert turns.order.holding == [set(), set()]


@pytest.mark.parametrize("stops_first", [False, True])
def test_nobody_waits_in_a_step_that_was_stopped(stops_first):
    turns = Turns(2)
    turns.move(0, None, Place(0, False), holds=True)
    errors = []

    def wait():
        try:
            turns.move(1, None, Place(0, False), holds=True)
        except StoppedError as error:
            errors.append(error)

    if stops_first:
        turns.stop()
    thread = threading.Thread(target=wait)
    thread.start()
    turns.stop()
    turns.stop()
    thread.join()
    assert len(errors) == 1
    with pytest.raises(StoppedError):  # also the one that ran
        turns.move(0, Place(0, False), Place(1, False), holds=True)
    turns.end(0)
    turns.end(1)


def test_each_replica_has_its_own_run_of_shards():
    shards = StagedShards([[0, 1, 2], [3]], functools.partial(Turns, 2))
    assert [shards.next(1), shards.next(1), shards.next(0)] == [3, None, 0]
    shards.stop()
    assert shards.next(0) is None
