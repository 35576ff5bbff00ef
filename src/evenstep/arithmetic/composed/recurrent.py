"""A layer of a long short-term memory, in place of oneDNN's.

With i, f, o = σ(...) and g = tanh(...) of x Wᵀ + b + h Uᵀ + d, in the order i, f, g, o:
c' = f c + i g and h' = o tanh(c') (Hochreiter and Schmidhuber, 1997, as in `torch.nn.LSTM`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from evenstep.arithmetic.operations import composed

aten = torch.ops.aten

_LSTM = 2  # the number of the kind of layer


class _Saved(NamedTuple):
    """What the backward pass needs, as one tensor (times, batch, 6 · width).

    It holds the gates i, f, g, o after their activations, the cell before, and tanh(cell after).
    """

    gates: torch.Tensor
    before: torch.Tensor
    squashed: torch.Tensor

    @classmethod
    def of(cls, workspace: torch.Tensor, width: int) -> _Saved:
        return cls(
            workspace[..., : 4 * width],
            workspace[..., 4 * width : 5 * width],
            workspace[..., 5 * width :],
        )


@composed("mkldnn_rnn_layer")
def layer(
    x: torch.Tensor,
    weight0: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    weight3: torch.Tensor,
    hx_: torch.Tensor,
    cx_: torch.Tensor,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs (times, batch, width), the last state and cell, and what was saved."""
    assert mode == _LSTM
    assert not batch_sizes
    times, batch, _ = x.shape
    bias = weight2 + weight3 if has_biases else None
    inputs = x.reshape(times * batch, -1)
    of_inputs = inputs @ weight0.t() if bias is None else torch.addmm(bias, inputs, weight0.t())
    of_inputs = of_inputs.view(times, batch, 4 * hidden_size)
    recurrent = weight1.t()
    outputs = x.new_empty(times, batch, hidden_size)
    workspace = x.new_empty(times, batch, 6 * hidden_size)
    saved = _Saved.of(workspace, hidden_size)
    state, cell = hx_.view(batch, hidden_size), cx_.view(batch, hidden_size)
    for time in _order(times, reverse):
        sums = torch.addmm(of_inputs[time], state, recurrent)
        i, f, g, o = sums.split(hidden_size, 1)
        gates = torch.cat([torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)], 1)
        saved.gates[time], saved.before[time] = gates, cell
        i, f, g, o = gates.split(hidden_size, 1)
        cell = (f * cell).add_(i * g)
        squashed = torch.tanh(cell)
        saved.squashed[time] = squashed
        state = o * squashed
        outputs[time] = state
    return outputs, state.clone().view(hx_.shape), cell.clone().view(cx_.shape), workspace


@composed("mkldnn_rnn_layer_backward")
def layer_backward(
    x: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    weight3: torch.Tensor,
    weight4: torch.Tensor,
    hx_: torch.Tensor,
    cx_tmp: torch.Tensor,
    output: torch.Tensor,
    hy_: torch.Tensor,
    cy_: torch.Tensor,
    grad_output: torch.Tensor | None,
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
    workspace: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x, both weights, both biases, and the first state and cell."""
    times, batch, _ = x.shape
    saved = _Saved.of(workspace, hidden_size)
    of_state = torch.zeros_like(hy_) if grad_hy is None else grad_hy
    of_cell = torch.zeros_like(cy_) if grad_cy is None else grad_cy
    of_sums = x.new_empty(times, batch, 4 * hidden_size)
    for time in reversed(_order(times, reverse)):
        if grad_output is not None:
            of_state = of_state + grad_output[time]
        i, f, g, o = saved.gates[time].split(hidden_size, 1)
        squashed, before = saved.squashed[time], saved.before[time]
        of_cell = of_cell + aten.tanh_backward.default(of_state * o, squashed)
        of_sums[time] = torch.cat(
            [
                aten.sigmoid_backward.default(of_cell * g, i),
                aten.sigmoid_backward.default(of_cell * before, f),
                aten.tanh_backward.default(of_cell * i, g),
                aten.sigmoid_backward.default(of_state * squashed, o),
            ],
            1,
        )
        of_state = of_sums[time] @ weight2
        of_cell = of_cell * f
    earlier = torch.empty_like(output)
    order = _order(times, reverse)
    earlier[order[0]] = hx_
    for time, next_time in itertools.pairwise(order):
        earlier[next_time] = output[time]
    flat = of_sums.view(times * batch, -1)
    of_x = (flat @ weight1).view(x.shape)
    of_inner = flat.t() @ x.reshape(times * batch, -1)
    of_outer = flat.t() @ earlier.view(times * batch, -1)
    of_bias = flat.sum(0)
    return of_x, of_inner, of_outer, of_bias, of_bias.clone(), of_state, of_cell


def _order(times: int, reverse: bool) -> range:
    return range(times)[::-1] if reverse else range(times)
