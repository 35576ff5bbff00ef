"""Options that don't go together are refused by name; all others train to the same bits."""

import itertools
from pathlib import Path

import pytest
from torch import nn

import evenstep
from evenstep.devices import Device
from evenstep.errors import InputError
from evenstep.training.setup.arguments import Chosen
from evenstep.training.setup.combinations import APART, refuse_combinations
from trainers import open_trainer

GPU = Device("cuda", 0)
USES = {
    "compile": ("experiment", {"compile": True}),
    "bf16": ("experiment", {"precision": "bf16"}),
    "portable": ("experiment", {"arithmetic": "portable"}),
    "lockstep": ("layout", {"side_by_side": True}),
    "Stages": ("divide", evenstep.Stages("balanced")),
    "Slices": ("divide", evenstep.Slices()),
    "Owners": ("divide", evenstep.Owners()),
    "in flight": ("max_in_flight", 2),
    "GPU": ("devices", [GPU]),
    "processes": ("is_alone", False),
}
PAIRS = [*itertools.combinations(USES, 2)]


def judged(names):
    """Refuse a training with these uses, if they don't go together."""
    given = {"experiment": {}, "layout": {}, "max_in_flight": 1, "is_alone": True}
    given |= {"devices": evenstep.find_devices("cpu:0,cpu:1"), "divide": ()}
    for group, value in map(USES.get, names):
        if group == "divide":
            given["divide"] += (value,)
        elif group == "experiment":
            given["experiment"] |= value
        else:
            given[group] = value
    chosen = Chosen(
        experiment=evenstep.Experiment(**given["experiment"]),
        layout=evenstep.Layout(**given["layout"], divide=given["divide"]),
        faults=evenstep.Faults(),
        devices=given["devices"],
        max_in_flight=given["max_in_flight"],
    )
    refuse_combinations(chosen, is_alone=given["is_alone"])


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_pair_is_refused_by_both_names_if_it_stands_in_the_table(pair):
    if pair not in APART and pair[::-1] not in APART:
        judged(pair)
        return
    with pytest.raises(InputError, match="^got .+ and .+, but .+: .+") as caught:
        judged(pair)
    assert "\n" not in str(caught.value)
    assert APART.get(pair, APART.get(pair[::-1]))[0] in str(caught.value)


def test_batch_norm_over_the_batch_counts_as_lockstep():
    message = "got compile=True and batch_norm='sync', but .* can't be compiled: use one of them"
    with pytest.raises(InputError, match=message):
        open_trainer(nn.Linear(2, 2), compile=True, batch_norm="sync")


def test_the_table_names_what_a_trainer_can_use():
    assert {*itertools.chain.from_iterable(APART)} <= USES.keys()


IN_WORDS = {
    "compile=True": "compile",
    'precision="bf16"': "bf16",
    'arithmetic="portable"': "portable",
    "lockstep": "lockstep",
    "max_in_flight": "in flight",
    "GPUs": "GPU",
    "several processes": "processes",
    **{name: name for name in ("Stages", "Slices", "Owners")},
}


def test_the_page_of_layouts_has_the_table():
    page = Path(__file__).parents[2] / "docs" / "layouts.md"
    rows = page.read_text().partition("| | can't be combined with |")[2].partition("\n\n")[0]
    found = set()
    for row in rows.splitlines()[2:]:
        _, one, others, _ = row.split("|")
        (name,) = [key for word, key in IN_WORDS.items() if word in one.split(":")[0]]
        found |= {frozenset((name, key)) for word, key in IN_WORDS.items() if word in others}
    assert found == {*map(frozenset, APART)}
