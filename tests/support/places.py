"""Layers that round by the addresses of their weights, and the ways in which weights get odd ones.

MKL's products do so on many processors, but not on all, and only for some shapes. `Peeled` does it
everywhere: like such a kernel, it first computes the elements up to a multiple of 64 bytes.
"""

import copy
import random

import numpy as np
import torch
from torch import nn

LINE = 64  # bytes


class _Product(torch.autograd.Function):
    """x @ weight.T, with the sum over the inputs in two parts that depend on the address."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _peeled(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return _peeled(gradient, weight, transposed=True), gradient.T @ x


def _peeled(x, weight, *, transposed=False):
    matrix = weight if transposed else weight.T
    first = -weight.data_ptr() % LINE // weight.itemsize % len(matrix)
    if not first:
        return x @ matrix
    return x[:, :first] @ matrix[:first] + x[:, first:] @ matrix[first:]


def by_address(x, weight):
    """Return x @ weight.T, rounded by the address of the weight."""
    return _Product.apply(x, weight)


class Peeled(nn.Linear):
    def forward(self, x):
        return by_address(x, self.weight) + self.bias


class Projected(nn.Module):
    """Multiplies by a buffer, as fixed projections do."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("basis", torch.randn(width, width) / width**0.5)

    def forward(self, x):
        return by_address(x, self.basis)


def odd_copy(tensor, offset=3):
    """Return a copy that begins `offset` elements behind a multiple of 64 bytes."""
    memory = torch.empty(offset + tensor.numel(), dtype=tensor.dtype)
    return memory[offset:].view(tensor.shape).copy_(tensor.detach()).data


def in_array(tensor, offset=3):
    """Return a copy in a numpy array that begins `offset` elements after a multiple of 64 bytes."""
    memory = np.zeros(tensor.numel() + 32, np.float32)
    start = (offset - memory.ctypes.data // 4) % 16
    found = torch.from_numpy(memory[start:][: tensor.numel()]).view(tensor.shape)
    return found.copy_(tensor.detach())


def aligned_clone(model):
    """Return a copy of a model whose parameters and buffers lie at multiples of 64 bytes."""
    copied = copy.deepcopy(model)
    for one in (*copied.parameters(), *copied.buffers()):
        one.data = one.data.clone()
        assert one.data_ptr() % LINE == 0
    return copied


# ---- ways; each returns what the user holds on to


def one_vector(model, rng):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())


def one_vector_kept(model, rng):
    flat = torch.cat([torch.zeros(rng.randrange(1, 16)), *map(torch.flatten, model.parameters())])
    flat, at = flat.detach().clone(), len(flat)
    for one in reversed([*model.parameters()]):
        at -= one.numel()
        one.data = flat[at : at + one.numel()].view(one.shape)
    return flat


def views(model, rng):
    for one in model.parameters():
        one.data = odd_copy(one, rng.randrange(16))


def from_numpy(model, rng):
    arrays = []
    for one in model.parameters():
        memory = np.zeros(one.numel() + 32, np.float32)
        arrays.append(memory[rng.randrange(16) :][: one.numel()].reshape(one.shape))
        arrays[-1][...] = one.detach().numpy()
        one.data = torch.from_numpy(arrays[-1])
    return arrays


def loaded(model, rng):
    """As a file of safetensors is mapped into memory."""
    mapped = {name: _mapped(one, rng) for name, one in model.state_dict().items()}
    model.load_state_dict(mapped, assign=True)


def _mapped(tensor, rng):
    """Return a copy in memory that torch has not allocated, as a mapped file is."""
    offset = rng.randrange(0, LINE, 8)
    memory = bytearray(offset + tensor.nbytes + LINE)
    found = torch.frombuffer(memory, dtype=tensor.dtype, offset=offset, count=tensor.numel())
    return found.view(tensor.shape).copy_(tensor)


WAYS = [one_vector, one_vector_kept, views, from_numpy, loaded]


def generator(seed):
    return random.Random(seed)
