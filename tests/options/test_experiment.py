"""The experiment: checked when it is created, and frozen."""

import dataclasses

import pytest
import torch

from evenstep.devices import Device
from evenstep.errors import InputError
from evenstep.options.experiment import Experiment


def test_the_defaults_are_the_designs():
    assert dataclasses.asdict(Experiment()) == {
        "shards": 8,
        "seed": 0,
        "precision": "fp32",
        "memory_format": "preserve",
        "threads": 1,
        "compile": False,
        "batch_norm": "shard",
        "separable": True,
        "buffers": {},
        "batch_dim": 0,
        "clip_norm": None,
        "arithmetic": "torch",
    }


def test_compile_is_yes_or_no():
    assert Experiment(compile=True).compile
    with pytest.raises(InputError, match="got compile='yes': give True or False"):
        Experiment(compile="yes")


@pytest.mark.parametrize(
    ("name", "least", "needed"),
    [
        ("shards", 1, "from 1 to 65536"),
        ("threads", 1, "from 1 to 1024"),
        ("seed", 0, "of at least 0"),
        ("batch_dim", 0, "from 0 to 64"),
    ],
)
def test_numbers_are_whole_and_large_enough(name, least, needed):
    assert getattr(Experiment(**{name: least}), name) == least
    for value in (least - 1, -5, 2.0, "3", True, None):
        with pytest.raises(InputError) as caught:
            Experiment(**{name: value})
        assert str(caught.value) == f"got {name}={value!r}: give an integer {needed}"


@pytest.mark.parametrize(
    ("name", "choices"),
    [("precision", "fp32, bf16"), ("memory_format", "preserve, contiguous, channels_last")],
)
def test_choices_are_checked(name, choices):
    for value in choices.split(", "):
        assert getattr(Experiment(**{name: value}), name) == value
    for value in ("fp16", "", None, ["bf16"]):
        with pytest.raises(InputError) as caught:
            Experiment(**{name: value})
        assert str(caught.value) == f"got {name}={value!r}: choose one of {choices}"


def test_an_experiment_is_frozen_and_made_by_keywords():
    experiment = Experiment()
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.shards = 4
    with pytest.raises(TypeError):
        Experiment(8)


FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.mark.parametrize("given", FORMATS)
@pytest.mark.parametrize("wanted", ["preserve", *FORMATS])
def test_images_are_copied_in_the_wanted_format(wanted, given):
    images = torch.randn(4, 3, 5, 5).to(memory_format=FORMATS[given])
    expected = torch.empty(
        4, 3, 5, 5, memory_format=FORMATS[given if wanted == "preserve" else wanted]
    )
    copy = Experiment(memory_format=wanted).placement(Device("cpu", 0))(images[1:3])
    assert copy.equal(images[1:3])
    assert copy.stride() == expected[1:3].stride()
    assert copy.data_ptr() != images[1:3].data_ptr()


def test_only_images_are_laid_out_channels_last():
    place = Experiment(memory_format="channels_last").placement(Device("cpu", 0))
    for ndim in (1, 2, 3, 5):
        tensor = torch.zeros([2] * ndim)
        assert place(tensor).stride() == tensor.stride()


def test_autocast_computes_in_bf16_or_not_at_all():
    assert Experiment(precision="fp32").autocast_dtype is None
    assert Experiment(precision="bf16").autocast_dtype is torch.bfloat16
