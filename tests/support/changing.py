"""A model that reads attributes of many kinds, and what a user may do to them between steps."""

import types

import numpy as np
import torch
from torch import nn


class Settings:
    def __init__(self):
        self.scale, self.inner = 1.0, types.SimpleNamespace(shift=[0.0])


class Slotted:
    __slots__ = ("gain",)

    def __init__(self):
        self.gain = 1.0


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(36, 8), nn.Linear(8, 5)
        self.act = torch.tanh
        self.cfg, self.slotted = Settings(), Slotted()
        self.head.cfg = self.cfg  # one object in two modules, as configurations are
        self.weights = np.ones(8, dtype=np.float32)
        self.kept = {0, 1, 2, 3}
        self.dtype = torch.float32
        self.size = (2, 4)
        self.nested = {"masks": [torch.ones(8)]}
        self.bonus = 0.5
        self.seen = []

    def forward(self, x):
        hidden = self.act(self.body(x.flatten(1))) * torch.from_numpy(self.weights)
        self.seen = [hidden]  # results that the next forward pass doesn't read
        hidden = hidden.to(self.dtype).float() * self.nested["masks"][0]
        hidden = hidden * torch.tensor([float(number in self.kept) for number in range(8)])
        hidden = hidden.reshape(-1, *self.size).flip(1).flatten(1) * self.slotted.gain
        hidden = hidden * self.head.cfg.scale + self.cfg.inner.shift[0]
        return self.head(hidden) + getattr(self, "bonus", 0)


def set_function(model):
    model.act = torch.relu


def set_lambda(model):
    model.act = lambda x: x * 0.5


def write_object(model):
    model.cfg.scale = 2.0


def write_inner_object(model):
    model.cfg.inner.shift[0] = 1.0


def write_slot(model):
    model.slotted.gain = 3.0


def write_array(model):
    model.weights[3:] = 0


def set_array(model):
    model.weights = np.linspace(0, 1, 8, dtype=np.float32)


def add_to_set(model):
    model.kept.add(6)


def set_dtype(model):
    model.dtype = torch.bfloat16


def set_tuple(model):
    model.size = (4, 2)


def write_nested_tensor(model):
    model.nested["masks"][0][2:5] = 0


def write_nested_tensor_past_the_counters(model):
    model.nested["masks"][0].data[2:5] = 0


def patch_forward(model):
    def forward(module, x):
        return -nn.functional.linear(x, module.weight, module.bias)

    model.head.forward = types.MethodType(forward, model.head)


def set_class(model):
    model.head.__class__ = Doubling


def delete(model):
    del model.bonus


def delete_then_make(model):
    """The new module may lie where the deleted one lay."""
    del model.head
    model.head = nn.utils.skip_init(Doubling, 8, 5)
    nn.init.ones_(model.head.weight)
    nn.init.ones_(model.head.bias)
    model.head.cfg = model.cfg
    model.head.requires_grad_(False)


def add_backward_pre_hook(model):
    model.head.register_full_backward_pre_hook(lambda module, output: (output[0] * 0.5,))


def add_backward_hook(model):
    model.head.register_full_backward_hook(lambda module, inputs, output: (inputs[0] * 0.5,))


CHANGES = [
    set_function, set_lambda, write_object, write_inner_object, write_slot, write_array, set_array,
    add_to_set, set_dtype, set_tuple, write_nested_tensor, write_nested_tensor_past_the_counters,
    patch_forward, set_class, delete, delete_then_make, add_backward_pre_hook, add_backward_hook,
]  # fmt: skip
