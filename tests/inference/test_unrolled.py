"""A model as one function: its operations, with the same bits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenstep.inference.unrolled import unrolled
from reference import plain_outputs


class Tied(nn.Module):
    """Uses one weight twice, functions by name, a constant of its own, and rows in three ways."""

    def __init__(self):
        super().__init__()
        self.one, self.bare = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.register_buffer("shift", torch.arange(6.0))

    def forward(self, x):
        x = F.relu(input=self.one(x)) + self.shift * torch.ones(6)
        x = F.linear(self.bare(x), self.one.weight, self.one.bias)
        return {"out": F.relu(x, inplace=True), "rows": self.one(x.unflatten(0, (-1, 1)))}


MODELS = {
    "mlp": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)), (4, 6)),
    "images": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.MaxPool2d(2)), (2, 3, 8, 8)),
    "three dimensions": (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()), (2, 5, 6)),
    "tied": (Tied(), (4, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_has_the_models_own_bits(name):
    model, shape = MODELS[name]
    model = model.eval()
    call = unrolled(model, (torch.randn(shape),))
    for _ in range(2):
        x = torch.randn(shape)
        found, expected = call(x.clone()), plain_outputs(model, x.clone())
        if isinstance(expected, torch.Tensor):
            found, expected = {"out": found}, {"out": expected}
        assert found.keys() == expected.keys()
        assert all(found[key].equal(expected[key]) for key in expected)
        assert not any(one.requires_grad for one in found.values())


def test_it_has_the_weights_of_the_time_when_it_was_made():
    model, x = nn.Linear(6, 2), torch.randn(4, 6)
    call, expected = unrolled(model, (x,)), plain_outputs(model, x)
    nn.init.zeros_(model.weight)
    assert call(x).equal(expected)


def test_linear_layers_on_rows_are_one_operation():
    call = unrolled(nn.Linear(6, 2), (torch.randn(4, 6),))
    with torch.profiler.profile() as profile:
        call(torch.randn(4, 6))
    assert {event.key for event in profile.key_averages() if "aten::" in event.key} >= {
        "aten::addmm"
    }
    assert "aten::linear" not in {event.key for event in profile.key_averages()}
