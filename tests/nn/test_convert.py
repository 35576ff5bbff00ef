"""Existing models whose layers are turned into sliced ones."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from evenstep import models
from evenstep.errors import ModelError
from evenstep.nn import SlicedConv2d, SlicedLinear, slice_, sliced_layers
from zoo import Tied


def kinds_of(model):
    return [type(one) for one in model.modules()]


def test_layers_keep_their_names_parameters_hooks_and_mode():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 6)).eval()
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    before, layers = dict(model.named_parameters()), list(model)
    state = model.state_dict()
    assert slice_(model, slices=2) is model
    assert kinds_of(model)[1:] == [SlicedConv2d, nn.Flatten, SlicedLinear]
    assert all(one is other for one, other in zip(model, layers, strict=True))
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert model.state_dict().keys() == state.keys()
    assert not model[2].training
    model(torch.randn(2, 1, 6, 6))
    assert calls == [1]


def test_a_model_that_is_a_layer_and_layers_that_were_sliced_before():
    layer = nn.Linear(8, 8)
    assert sliced_layers(slice_(layer, 2)) == {"": "2 slices (outputs)"}
    assert sliced_layers(slice_(layer, 4, along="inputs")) == {"": "4 slices (inputs)"}
    assert sliced_layers(slice_(layer, 1)) == {}


def test_chosen_layers_only():
    net = slice_(models.lenet(), 5, layers=["conv*"])
    slice_(net, 4, along="inputs", layers=["fc1"])
    assert sliced_layers(net) == {
        "conv1": "5 slices (outputs)",
        "conv2": "5 slices (outputs)",
        "fc1": "4 slices (inputs)",
    }


def test_tied_weights_stay_tied():
    model = slice_(Tied(), 3, layers=["encode", "decode"])
    assert model.encode.weight is model.decode.weight


def test_subclasses_are_left_as_they_are():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    slice_(model, 2)
    assert list(sliced_layers(model)) == ["1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slices": 4}, r"fc2 \(Linear\) can't be cut into 4 slices: 4 does not divide its "
                        r"out_features=10; use a different number of slices for it, or leave "
                        r"it whole"),
        ({"slices": 2.0}, "got slices=2.0: give an integer of at least 1"),
        ({"slices": 2, "along": "rows"}, "got along='rows': give 'outputs' or 'inputs'"),
        ({"slices": 2, "layers": ["fc3"]}, "layers names 'fc3', which is no layer of the model"),
        ({"slices": 2, "layers": ["relu*"]}, "no layer"),
    ],
)  # fmt: skip
def test_what_cant_be_sliced_is_refused_in_a_line_and_nothing_is_changed(options, message):
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(8, 8))
    model.add_module("relu1", nn.ReLU())
    model.add_module("fc2", nn.Linear(8, 10))
    before = kinds_of(model), repr(model), [dict(vars(one)) for one in model.modules()]
    with pytest.raises(ModelError, match=message) as caught:
        slice_(model, **options)
    assert "\n" not in str(caught.value)
    assert (kinds_of(model), repr(model), [dict(vars(one)) for one in model.modules()]) == before


def test_something_that_is_no_model():
    with pytest.raises(ModelError, match=r"give a torch\.nn\.Module"):
        slice_([nn.Linear(4, 4)], 2)
