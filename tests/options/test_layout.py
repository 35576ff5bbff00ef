"""A layout: what it accepts, and how it reads."""

import dataclasses

import pytest

from evenstep import Faults, Layout, Owners, Slices, Stages
from evenstep.engine import InlineLanes, ThreadLanes
from evenstep.errors import InputError

STAGES = Stages({"features": 0, "classifier": 1})


@pytest.mark.parametrize(
    ("divide", "stages", "has_slices", "has_owners"),
    [
        ((), None, False, False),
        (STAGES, STAGES, False, False),
        (Slices(), None, True, False),
        (Owners(), None, False, True),
        ((Owners(), STAGES), STAGES, False, True),
        ((Slices(), Owners()), None, True, True),
    ],
    ids=str,
)
def test_one_division_or_several(divide, stages, has_slices, has_owners):
    layout = Layout(divide=divide)
    assert layout.stages is stages
    assert (layout.has_slices, layout.has_owners) == (has_slices, has_owners)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divide": "balanced"}, "got divide='balanced': give Stages"),
        ({"divide": None}, "got divide=None: give Stages"),
        ({"divide": Stages}, "got divide=.*Stages.*: give Stages"),
        ({"divide": (STAGES, Owners)}, "give Stages"),
        ({"divide": (Owners(), Owners())}, "give each division once"),
        ({"side_by_side": 1}, "got side_by_side=1: give True or False"),
        ({"tune_malloc": "no"}, "got tune_malloc='no': give True or False"),
        ({"lanes": 2}, "got lanes=2: give a class such as ThreadLanes"),
    ],
)
def test_other_values_are_refused_by_name(options, message):
    with pytest.raises(InputError, match=message):
        Layout(**options)


def test_a_layout_reads_as_it_was_written():
    assert repr(Layout()) == "Layout()"
    layout = Layout(divide=(Stages("balanced:2"), Owners()), lanes=InlineLanes)
    shown = "Layout(divide=(Stages('balanced:2'), Owners()), lanes=InlineLanes)"
    assert repr(layout) == shown
    assert eval(shown) == layout


@pytest.mark.parametrize("group", [Layout(), Faults()], ids=str)
def test_groups_of_options_never_change(group):
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.lanes = ThreadLanes
