"""Many kinds of training as short programs, each beside its plain loop: the same on any devices."""

import json
import math

import pytest
import torch

from kinds import NAMES, load, outcome
from launched import launched

LIBRARIES = {"lightning_module": "lightning", "lora_transformers": "transformers"}
GATHERS = {"clip", "cpc", "moe", "triplet", "unet_dice"}  # compare the examples of a batch
OF_SHARDS = {"byol", "simsiam"}  # normalise each shard by itself, so V decides
BY_SLOPES = {"dice_in_two_passes"}  # computes another loss with the same gradients
LEARNS_SLOWLY = {"grpo", "lora_transformers", "moco", "ppo"}  # more than the test's steps
ONE, TWO, THREE = ["cpu:0"], ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1:own", "cpu:2"]
QUICK = [name for name in NAMES if name not in LIBRARIES]
WARNS = [
    pytest.mark.slow,  # the import of the library
    pytest.mark.filterwarnings("default"),  # its own
]
EVERY = [pytest.param(name, marks=WARNS if name in LIBRARIES else ()) for name in NAMES]


def program(name):
    pytest.importorskip(LIBRARIES.get(name, "torch"))
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch 2.9 has Muon")
    return load(name)


def test_there_are_many_kinds():
    assert len(NAMES) >= 25
    assert {*LIBRARIES, *GATHERS, *OF_SHARDS, *BY_SLOPES, *LEARNS_SLOWLY} <= {*NAMES}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.thinned(5)
def test_a_kind_is_the_same_on_any_devices(name):
    kind = program(name)
    one = outcome(*kind.even(ONE))
    assert outcome(*kind.even(TWO)) == one
    assert outcome(*kind.even(THREE)) == one
    _, losses = one
    assert len(losses) >= 6
    assert all(map(math.isfinite, losses))
    assert len({*losses}) > 1
    assert name in LEARNS_SLOWLY or min(losses[1:]) < losses[0]


@pytest.mark.parametrize("name", [one for one in EVERY if one.values[0] not in BY_SLOPES])
@pytest.mark.thinned(2)
def test_with_one_shard_it_is_the_plain_loop(name):
    kind = program(name)
    assert outcome(*kind.even(ONE, shards=1)) == outcome(*kind.plain())


@pytest.mark.parametrize("name", [one for one in EVERY if one.values[0] not in OF_SHARDS])
@pytest.mark.thinned(3)
def test_with_eight_shards_it_is_the_plain_loop_within_rounding(name):
    kind = program(name)
    _, _, plain = kind.plain()
    assert kind.even(ONE)[2] == pytest.approx(plain, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_kind_is_the_same_in_two_processes(tmp_path):
    """Or it is refused, because its shards meet."""
    finished = launched(2, "kinds.py", tmp_path, *QUICK)
    assert finished.returncode == 0, finished.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name in QUICK:
        for found in ranks:
            if name in GATHERS:
                assert found[name].startswith("got side_by_side=True and several processes")
            else:
                assert found[name] == outcome(*load(name).even(ONE)), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trainers_of_other_libraries_refuse_several_processes(tmp_path):
    for library in LIBRARIES.values():
        pytest.importorskip(library)
    finished = launched(2, "kinds.py", tmp_path, *LIBRARIES)
    assert finished.returncode == 0, finished.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, integration in zip(LIBRARIES, ("EvenStrategy", "EvenTrainer"), strict=True):
            assert found[name].startswith(f"{integration} got several processes: start one")
