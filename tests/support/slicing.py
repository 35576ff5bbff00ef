"""Sliced layers: an explicit reference, crews of threads, and a model made of them."""

import contextlib
import threading
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from evenstep.devices import as_device
from evenstep.nn import SlicedConv2d, SlicedEmbedding, SlicedLinear, slice_
from evenstep.nn.slice_runners import Exchanged, SlicingDevices, runner_here
from reference import tree
from zoo import CLASSES


class Found(NamedTuple):
    """What a layer computes: its output, and the gradients of input, weight and bias."""

    output: torch.Tensor
    x: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None


def run_layer(layer, x, dy):
    """Run a layer forward and backward; `dy` is the gradient with respect to its output."""
    x = x.clone().requires_grad_(x.is_floating_point())
    layer.zero_grad()
    output = layer(x)
    output.backward(dy)
    bias = getattr(layer, "bias", None)
    return Found(output.detach(), x.grad, layer.weight.grad, None if bias is None else bias.grad)


def plain_slice(layer, x, weight, bias, groups=1):
    """Compute one slice as torch does."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, groups)


def leaf(tensor, whole):
    """Return a copy with strides and memory of its own, laid out like `whole`; it gets a gradient.

    Kernels that can be read both ways count as contiguous.
    """
    last = torch.channels_last
    is_last = whole.dim() == 4 and whole.is_contiguous(memory_format=last)
    layout = last if is_last and not whole.is_contiguous() else torch.contiguous_format
    return tensor.detach().clone(memory_format=layout).requires_grad_(tensor.is_floating_point())


def reference(layer, x, dy, slices, along):
    """Compute a Linear or Conv2d layer (zero padding) by explicit slices and an explicit tree."""
    dim = -1 if isinstance(layer, nn.Linear) else 1
    weight, bias = layer.weight.detach(), layer.bias
    if isinstance(layer, nn.Linear):
        x, dy, shape = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), dy.shape
    else:
        shape = dy.shape
    groups = getattr(layer, "groups", 1)
    readers = slices // min(groups, slices) if along == "outputs" else 1
    x_parts = x.chunk(slices // readers, dim) if along == "inputs" or groups > 1 else [x]
    outputs, dx, dw, db = [], [], [], []
    for k in range(slices):
        x_k = leaf(x_parts[k // readers], x)
        w_k = leaf(weight.chunk(slices, 1 if along == "inputs" else 0)[k], weight)
        b_k = leaf(bias.chunk(slices)[k], bias) if bias is not None and along == "outputs" else None
        y_k = plain_slice(layer, x_k, w_k, b_k, max(1, groups // slices))
        dy_k = leaf(dy.chunk(slices, dim)[k] if along == "outputs" else dy, x).detach()
        y_k.backward(dy_k)
        outputs.append(y_k.detach())
        dx.append(x_k.grad)
        dw.append(w_k.grad)
        db.append(None if b_k is None else b_k.grad)
    if along == "outputs":
        groups_of_readers = [dx[at : at + readers] for at in range(0, slices, readers)]
        x_gradient = torch.cat([tree(one, torch.add) for one in groups_of_readers], dim)
        bias_gradient = None if bias is None else torch.cat(db)
        return torch.cat(outputs, dim).reshape(shape), x_gradient, torch.cat(dw), bias_gradient
    output, bias_gradient = tree(outputs, torch.add), None
    if bias is not None:
        rest = [axis for axis in range(dy.dim()) if axis != dim % dy.dim()]
        output = output + bias.detach().view([-1 if a not in rest else 1 for a in range(dy.dim())])
        bias_gradient = dy.sum(rest)
    return output.reshape(shape), torch.cat(dx, dim), torch.cat(dw, 1), bias_gradient


@contextlib.contextmanager
def crew_of(names, exchanged=None):
    """Inside, sliced layers of this thread are computed by the named devices, in threads."""
    members = {lane: as_device(name) for lane, name in enumerate(names)}
    crew = SlicingDevices(members, Exchanged() if exchanged is None else exchanged)
    threads = [threading.Thread(target=_help, args=(crew, lane)) for lane in members if lane]
    for thread in threads:
        thread.start()
    outside = runner_here.set(crew)
    try:
        yield crew
    finally:
        runner_here.reset(outside)
        crew.stop()
        for thread in threads:
            thread.join()


def _help(crew, lane):
    torch.get_num_threads()
    torch.set_num_threads(1)
    crew.help(lane)


class Sliced(nn.Module):
    """Layers of every kind, cut in both directions, some of them read by several others."""

    def __init__(self, slices=4):
        super().__init__()
        self.table = SlicedEmbedding(12, 8, padding_idx=3, slices=slices)
        self.rows = SlicedEmbedding(12, 8, slices=slices, along="inputs")
        self.conv = SlicedConv2d(1, 8, 3, slices=slices)
        self.conv2 = SlicedConv2d(8, 8, 3, padding=1, slices=slices, along="inputs")
        self.query, self.key = (SlicedLinear(128, 16, slices=slices) for _ in range(2))
        self.value = SlicedLinear(128, 16, slices=slices, along="inputs")
        self.key.weight = self.query.weight
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        tokens = (x.flatten(1)[:, :5] * 3).long().clamp(-6, 5) + 6
        words = torch.cat([self.table(tokens), self.rows(tokens)], -1).mean(1)
        x = self.conv2(self.conv(x.reshape(-1, 1, 6, 6)).relu()).flatten(1)
        mixed = self.query(x).tanh() * self.key(x).sigmoid() + self.value(x)
        return self.head(torch.cat([words, mixed], 1))


def sliced_model(slices=4, seed=0):
    torch.manual_seed(seed)
    return Sliced(slices)


def sliced(model, **options):
    """Return a model with layers sliced in two."""
    return slice_(model, 2, **options)
