"""Code that compiles or caches behind the scenes, called by shards: the bits are the same anywhere.

Autocast keeps one cache of cast weights for all threads. `torch.jit.script` compiles a function
after some calls, and then it rounds differently.
"""

import functools
import warnings

import pytest
import torch
from torch import nn

from layouts import LAYOUTS, delayed, own
from reference import assert_same_bits
from trainers import open_trainer, state_of

BATCHES = [(torch.randn(24, 12, generator=torch.Generator().manual_seed(i)), torch.arange(24) % 5)
           for i in range(4)]  # fmt: skip


class AutocastInForward(nn.Module):
    """Uses a weight several times under autocast, as recurrent and tied layers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.again, self.head = delayed(nn.Linear(12, 12)), nn.Linear(12, 5)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(4):
                x = torch.tanh(self.again(x))
            return self.head(x).float()


def activation(x):
    normal = torch.nn.functional.layer_norm(x, [12])
    return torch.tanh(x) * torch.sigmoid(x) + torch.nn.functional.gelu(x) + normal


@functools.cache
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        return torch.jit.script(activation)


class ScriptedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(scripted()(self.body(x)))


def trained(model, **options):
    with open_trainer(model(), **options) as trainer:
        for batch in BATCHES:
            trainer.step(*batch)
        trainer.waitall()
        return state_of(trainer)


@pytest.mark.parametrize("model", [AutocastInForward, ScriptedFunction])
def test_bits_are_the_same_on_any_devices(model):
    alone = trained(model, devices=1)
    for devices in LAYOUTS.values():
        assert_same_bits(trained(model, devices=devices), alone)
    assert_same_bits(trained(model, devices=own(2), max_in_flight=2), alone)


def test_the_callers_own_modes_stay():
    trained(AutocastInForward, devices=2)
    assert torch.is_autocast_cache_enabled()
    assert torch._C._get_graph_executor_optimize()
