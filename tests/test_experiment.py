"""The experiment: checked when it is created, and frozen."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from evenstep.errors import InputError
from evenstep.experiment import Experiment, resolve_format


def test_the_defaults_are_the_designs():
    assert dataclasses.asdict(Experiment()) == {
        "shards": 8,
        "seed": 0,
        "precision": "fp32",
        "memory_format": "auto",
        "threads": 1,
        "compile": False,
        "batch_norm": "shard",
        "separable": True,
        "buffers": {},
        "batch_dim": 0,
        "clip_norm": None,
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
    [("precision", "fp32, bf16"), ("memory_format", "auto, contiguous, channels_last")],
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


MODELS = {
    "linear": lambda: nn.Linear(3, 3),
    "conv1d": lambda: nn.Conv1d(3, 3, 2),
    "conv3d": lambda: nn.Conv3d(3, 3, 2),
    "conv2d": lambda: nn.Conv2d(3, 3, 2),
    "nested": lambda: nn.Sequential(nn.ReLU(), nn.ModuleList([nn.Conv2d(1, 1, 1)])),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(3, 3, 2)),
}
CONVOLVING = ("conv2d", "nested", "transposed")


@pytest.mark.parametrize("model", MODELS)
def test_the_memory_format_is_a_rule(model):
    for kind, precision in itertools.product(("cpu", "cuda"), ("fp32", "bf16")):
        last = model in CONVOLVING and (kind, precision) != ("cuda", "fp32")
        expected = "channels_last" if last else "contiguous"
        assert resolve_format(MODELS[model](), kind, precision) == expected
        experiment = Experiment(precision=precision, shards=3, seed=7, threads=2)
        resolved = experiment.resolved_for(MODELS[model](), kind)
        assert resolved == dataclasses.replace(experiment, memory_format=expected)


@pytest.mark.parametrize("chosen", ["contiguous", "channels_last"])
def test_a_chosen_memory_format_stays(chosen):
    experiment = Experiment(memory_format=chosen)
    for model, kind in itertools.product(MODELS.values(), ("cpu", "cuda")):
        assert experiment.resolved_for(model(), kind) == experiment


def test_only_images_are_laid_out_channels_last():
    last, contiguous = (Experiment(memory_format=name) for name in ("channels_last", "contiguous"))
    for ndim in (1, 2, 3, 4, 5):
        tensor = torch.zeros([1] * ndim)
        expected = torch.channels_last if ndim == 4 else torch.contiguous_format
        assert last.image_format(tensor) == expected
        assert contiguous.image_format(tensor) == torch.contiguous_format


def test_autocast_computes_in_bf16_or_not_at_all():
    assert Experiment(precision="fp32").autocast_dtype is None
    assert Experiment(precision="bf16").autocast_dtype is torch.bfloat16
