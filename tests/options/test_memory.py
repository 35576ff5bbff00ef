"""The estimate of a training's peak: as few sets of gradients as any order needs, and measured."""

import functools
import itertools
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep.batch import contiguous_runs, dealt_pairs
from evenstep.batch.assignment import Pace, ShardQueue
from evenstep.collectives import tree_plan, values_at_once
from evenstep.options.memory import Sizes, peak_nbytes, sizes_of
from evenstep.training import notes
from trainers import open_trainer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
POWERS = [2**k for k in range(6)]


def fewest_at_once(shards, devices):
    """Return the fewest values that any order needs in which all devices compute to the end.

    Searches all states. A state is the set of nodes whose values are there, as (lo, hi).
    """
    nodes = {(lo, lo + n) for n in POWERS for lo in range(0, shards, n) if n <= shards}

    def added(held):
        for lo, hi in held:
            two = {(lo, hi), (hi, 2 * hi - lo)}
            whole = (lo, 2 * hi - lo)
            if whole in nodes and two <= held:
                return added((held - two) | {whole})
        return held

    def after(held, leaves):
        """Return the values that are there meanwhile, and those afterwards."""
        done, meanwhile = set(held), len(held)
        for leaf in leaves:
            left = next(((lo, hi) for lo, hi in held if hi == leaf and hi - lo == 1), None)
            if left is not None and left[0] % 2 == 0:
                done.remove(left)
                done.add((leaf - 1, leaf + 1))
            else:
                done.add((leaf, leaf + 1))
                meanwhile += 1
        return meanwhile, frozenset(added(frozenset(done)))

    @functools.cache
    def rest(held):
        left = [n for n in range(shards) if not any(lo <= n < hi for lo, hi in held)]
        if not left:
            return 0
        found = (after(held, leaves) for leaves in itertools.combinations(left, devices))
        return min(max(now, rest(later)) for now, later in found)

    return rest(frozenset())


@pytest.mark.parametrize(
    ("shards", "devices"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (4, 4), (8, 4)]
)
def test_no_order_needs_fewer_sets_of_gradients(shards, devices):
    runs = dealt_pairs(range(shards), (shards // devices,) * devices)
    ours = values_at_once(tree_plan(shards, shards), runs)
    assert ours == fewest_at_once(shards, devices)


@pytest.mark.parametrize("devices", POWERS[:4])
@pytest.mark.parametrize("shards", POWERS)
def test_the_sets_of_gradients_are_those_of_the_formula(shards, devices):
    if shards < devices:
        return
    runs = dealt_pairs(range(shards), (shards // devices,) * devices)
    expected = devices + max(0, math.log2(shards / (2 * devices)))
    assert values_at_once(tree_plan(shards, shards), runs) == expected
    contiguous = contiguous_runs(range(shards), [1.0] * devices)
    bound = devices * max(1, math.log2(shards / devices))
    assert values_at_once(tree_plan(shards, shards), contiguous) == bound >= expected


@pytest.mark.parametrize("lengths", [(8,), (4, 4), (5, 3), (3, 3, 2), (7, 0), (1, 7), (0, 3, 6)])
def test_pairs_are_dealt_out_once_each_and_in_order(lengths):
    runs = dealt_pairs(range(3, 3 + sum(lengths)), lengths)
    assert sorted(itertools.chain(*runs)) == [*range(3, 3 + sum(lengths))]
    assert (*map(len, runs),) == lengths
    assert all(run == sorted(run) for run in runs)


def test_lanes_take_pairs_in_turn_and_a_late_one_leaves_its_pairs_to_the_others():
    queue = ShardQueue(dealt_pairs(range(8), (4, 4)), Pace(2), [], in_turn=True)
    assert queue.next(0) == 0
    assert [queue.next(1) for _ in range(6)] == [2, 3, 4, 5, 6, 7]
    assert queue.next(1) == 1  # of the late one's own pair
    assert queue.next(0) is None


@pytest.mark.parametrize("lengths", [*itertools.product(range(1, 6), repeat=3)], ids=str)
def test_every_shard_is_computed_once(lengths):
    queue = ShardQueue(dealt_pairs(range(sum(lengths)), lengths), Pace(3), [], in_turn=True)
    taken = [queue.next(number % 3) for number in range(3 * sum(lengths))]
    assert sorted(one for one in taken if one is not None) == [*range(sum(lengths))]


def sizes(**more):
    return Sizes(parameters=100, gradients=100, state=200, **more)


@pytest.mark.parametrize("shards", POWERS)
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("memories", ["a", "aa", "ab", "aab"])
def test_owners_never_need_more(shards, processes, memories):
    given = sizes(), max(shards, processes), memories
    whole = peak_nbytes(*given, processes=processes)
    owned = peak_nbytes(*given, processes=processes, owners=True)
    assert all(one <= other for one, other in zip(owned, whole, strict=True))


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda them: torch.optim.SGD(them), 0),
        (lambda them: torch.optim.SGD(them, momentum=0.9), 1),
        (lambda them: torch.optim.Adam(them), 2),
        (lambda them: torch.optim.AdamW(them, amsgrad=True), 3),
        (lambda them: torch.optim.RMSprop(them, momentum=0.9, centered=True), 3),
        (lambda them: torch.optim.Adagrad(them), 1),
        (lambda them: torch.optim.Adadelta(them), 2),
        (lambda them: torch.optim.NAdam(them), 2),
        (lambda them: torch.optim.ASGD(them), 1),
    ],
)
def test_the_state_of_an_optimizer_is_known_before_it_is_there(make, tensors):
    model = nn.Linear(64, 64, bias=False)
    optimizer = make([*model.parameters()])
    before = sizes_of([*model.parameters()], optimizer)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    after = sizes_of([*model.parameters()], optimizer)
    assert before.state == pytest.approx(tensors * 64 * 64 * 4, abs=16)  # and numbers of steps
    assert after.state == after.held_state == pytest.approx(before.state, abs=16)


# ---- what is said


@pytest.mark.parametrize(("free", "is_said"), [(10**5, True), (10**9, False), (None, False)])
def test_a_training_that_needs_more_than_is_free_says_so_before_its_first_step(
    free, is_said, monkeypatch, caplog
):
    monkeypatch.setattr(notes, "free_memory_nbytes", lambda place: free)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        caplog.at_level(logging.WARNING, "evenstep"),
        open_trainer(model, nn.MSELoss(), optimizer=optimizer, devices=1, shards=8),
    ):
        said = [one.getMessage() for one in caplog.records if "at its peak" in one.getMessage()]
    assert len(said) == is_said
    if is_said:
        held = 256 * 257 * 4 + 4
        needed = held * 6 + 2 * 256 * 256 * 4  # and what an update computes aside
        (text,) = said
        assert "\n" not in text
        assert f"about {needed / 2**30:.3g} GiB of the memory of cpu" in text
        assert f"{(needed - held) / 2**30:.3g} GiB more than now" in text
        assert f"{free / 2**30:.3g} GiB are free" in text


# ---- what is measured

MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from evenstep.batch.assignment import Pace, ShardQueue
from specs import copies
# On devices of equal speed, as estimated: on a busy machine, the faster one would take more shards.
Pace.learn = lambda *_: None
ShardQueue._steal = lambda *_: None
found = copies.measure({**copies.LAYOUTS[sys.argv[2]], "layers": 24, "width": 512, "steps": 4})
if found: print(json.dumps(found))
"""
QUICK = ("one device, V = 8", "two devices, one with memory of its own")
LAYOUTS = [
    "one device, V = 1",
    "one device, V = 32",
    "two devices, V = 8",
    "two devices, V = 32",
    "the same, owners",
    "two steps in flight",
    "two steps in flight, two devices",
    "two processes",
    "two processes, owners",
]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are those of Linux")
@pytest.mark.parametrize(
    "layout", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS)]
)
def test_the_estimate_is_what_is_measured(layout):
    start = [sys.executable]
    if "processes" in layout:
        start += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--no-python",
        ]
        start += [sys.executable]
    command = [*start, "-c", MEASURE, str(BENCHMARKS), layout]
    # freed blocks of 64 KiB are returned at once
    variables = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["copies"] == pytest.approx(found["estimate"], rel=0.1)
