"""Which modules and parameters each stage has, and what is refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenstep.devices import find_devices
from evenstep.errors import EvenstepError
from evenstep.models.gpt import gpt
from evenstep.models.resnet import resnet18
from evenstep.stages.balance import balance, balanced_stages, parts_of
from evenstep.stages.plan import find_stages
from zoo import Tied

CPUS = find_devices(2)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.features = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(nn.Linear(2, 2).weight)
        self.head = nn.Linear(2, 2)


def test_a_named_module_begins_a_run_that_lasts_until_the_next_one():
    stages = find_stages({"stem": 0, "features.2": 1}, Wrapped(), CPUS)
    assert stages.of_module == {
        "stem": 0, "features": 0, "features.0": 0, "features.1": 0, "features.2": 1, "head": 1,
    }  # fmt: skip
    assert stages.of_parameter == [0, 0, 0, 0, 1, 1, 1, 1]
    model = Wrapped()
    assert [len(own) for own in stages.parameters_of(model)] == [4, 4]
    assert stages.parameters_of(model)[1][0] is model.features[2].weight


def test_a_later_run_may_belong_to_an_earlier_stage():
    stages = find_stages({"stem": 1, "features": 0, "head": 1}, Wrapped(), CPUS)
    assert stages.of_parameter == [1, 1, 0, 0, 0, 0, 1, 1]


def test_a_tied_weight_lies_where_it_is_registered_first():
    stages = find_stages({"encode": 0, "decode": 1}, Tied(), CPUS)
    assert stages.of_parameter == [0, 0, 1, 1, 1]


def test_a_module_that_reaches_over_a_cut_is_not_whole():
    model = Wrapped()
    stages = find_stages({"stem": 0, "features.2": 1}, model, CPUS)
    whole = [name for name, one in model.named_modules() if stages.has_whole(name, one)]
    assert whole == ["stem", "features.0", "features.2", "head"]
    model.stem.register_parameter("none", None)
    model.insert = nn.BatchNorm1d(2, affine=False)
    model.again = nn.Sequential(model.stem, nn.ReLU())  # a module under two names
    assert not find_stages({"stem": 0, "head": 1}, model, CPUS).has_whole("again", model.again)
    assert find_stages({"stem": 0, "head": 1}, model, CPUS).has_whole("features", model.features)


REFUSED = {
    "no module": ({"stem": 0, "feature.2": 1}, "'feature.2'.* did you mean 'features.2'"),
    "a gap": ({"stem": 0, "head": 2}, "numbers 0, 2, and 1 is missing"),
    "no first stage": ({"stem": 1, "head": 2}, "numbers 1, 2, and 0 is missing"),
    "too many": ({"stem": 0, "features": 1, "head": 2}, "3 stages for 2 devices.*use 3 devices"),
    "before": ({"features": 0, "head": 1}, "stem.weight comes before .*name 'stem' too"),
    "no number": ({"stem": "0"}, "stage '0' for 'stem'"),
    "a flag": ({"stem": True}, "stage True for 'stem'"),
    "negative": ({"stem": -1}, "stage -1 for 'stem'"),
    "no name": ({0: 0}, "module 0 in Stages"),
    "empty": ({}, r"got Stages\({}\)"),
    "a word": ("even", '"balanced", "balanced:2"'),
    "zero": ("balanced:0", "balanced"),
    "a measure": ("balanced:2:seconds", '"balanced:2:time"'),
    "a number": (3, r"got Stages\(3\)"),
    "three": ("balanced:3", "3 stages for 2 devices"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_can_not_be_is_refused_in_one_line(given):
    names, message = REFUSED[given]
    with pytest.raises(EvenstepError, match=message) as caught:
        find_stages(names, Wrapped(), CPUS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [{"head": 0}, "balanced:1"])
def test_a_parameter_of_the_model_itself_lies_in_no_stage(names):
    with pytest.raises(EvenstepError, match="position belongs to the model itself"):
        find_stages(names, Rooted(), CPUS)


def test_devices_of_two_kinds_can_not_take_turns():
    with pytest.raises(EvenstepError, match="cpu:0, cpu:1:own: give devices"):
        find_stages("balanced", Wrapped(), find_devices("cpu:0,cpu:1:own"))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_the_largest_run_is_as_small_as_possible(sizes, runs):
    runs = min(runs, len(sizes))

    def largest(starts):
        return max(sum(sizes[lo:hi]) for lo, hi in itertools.pairwise([*starts, len(sizes)]))

    found = balance(sizes, runs)
    assert found == sorted({*found})
    assert found[0] == 0
    assert len(found) == runs
    choices = itertools.combinations(range(1, len(sizes)), runs - 1)
    assert largest(found) == min(largest([0, *cuts]) for cuts in choices)


def test_blocks_are_not_cut():
    assert balanced_stages(parts_of(resnet18()), 2) == {"0": 0, "resnet_block4.1": 1}
    assert balanced_stages(parts_of(gpt(layers=4)), 3) == {
        "tokens": 0,
        "blocks.1": 1,
        "blocks.3": 2,
    }


def test_balanced_stages_have_about_the_same_bytes():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    stages = find_stages("balanced:3", model, find_devices(3))
    assert stages.first == {"0": 0, "2": 1, "4": 2}


def test_too_few_parts_to_cut():
    with pytest.raises(EvenstepError, match=r"2 stages: it has 1 part with parameters"):
        find_stages("balanced", nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), CPUS)
