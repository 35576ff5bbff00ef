"""A network in stages, each on an accelerator of its own, has the bits of one CPU device."""

import pytest

import emu
import evenstep
from good_models import MODELS
from test_sameness import ROUNDED, UNFIT, assert_bits_of_a_cpu

LAYOUTS = {
    "2 of 2": (["emu:0", "emu:1"], "balanced"),
    "3 of 3": (["emu:2", "emu:0", "emu:1"], "balanced"),
    "two replicas": (["emu:0", "emu:1", "emu:2", "emu:3"], "balanced:2"),
    "two replicas, crossed": (["emu:0", "emu:1", "emu:1", "emu:0"], "balanced:2"),
    "two stages on one": (["emu:1", "emu:1"], "balanced"),
}


@pytest.mark.parametrize("mode", emu.MODES)
@pytest.mark.parametrize(("devices", "names"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_every_layout_in_every_mode(mode, devices, names, in_flight):
    emu.configure(mode, seed=in_flight, delay_us=20)
    layout = {"devices": devices, "divide": evenstep.Stages(names)}
    assert_bits_of_a_cpu(MODELS["mlp"], max_in_flight=in_flight, **layout)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in {*UNFIT, *ROUNDED}])
def test_every_model(name):
    assert_bits_of_a_cpu(
        MODELS[name], devices=["emu:0", "emu:1"], divide=evenstep.Stages("balanced")
    )
