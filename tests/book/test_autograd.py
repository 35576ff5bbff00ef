"""Gradients through collectives: checked over all processes' inputs and outputs at once."""

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from evenstep.book.autograd import all_gather, all_reduce
from evenstep.collectives import connect
from over_threads import on_each


def jointly(collective, processes):
    """Return a function from every process's input to every process's output, with gradients."""

    def outputs(inputs, use):
        def part(end):
            return use(end.rank, collective(inputs[end.rank], end))

        return on_each(connect(processes), part)

    class Joint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return tuple(outputs(inputs, lambda rank, output: output.detach()))

        @staticmethod
        def backward(ctx, *gradients):
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]

            def back(rank, output):
                return torch.autograd.grad(output, inputs[rank], gradients[rank])[0]

            with torch.enable_grad():
                return tuple(outputs(inputs, back))

    return Joint.apply


def inputs(processes):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(processes)
    ]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("collective", [all_reduce, all_gather])
def test_gradients_flow_through(collective, processes):
    assert torch.autograd.gradcheck(jointly(collective, processes), inputs(processes))


def test_a_wrong_gradient_would_be_seen():
    def wrong(tensor, end):
        return tensor + all_reduce(tensor.detach(), end)

    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(jointly(wrong, 2), inputs(2))


def test_all_reduce_adds_and_all_gather_stacks():
    parts = inputs(3)
    for total in on_each(connect(3), lambda end: all_reduce(parts[end.rank], end)):
        assert torch.equal(total, (parts[0] + parts[1]) + parts[2])
    for rows in on_each(connect(3), lambda end: all_gather(parts[end.rank], end)):
        assert torch.equal(rows, torch.stack(parts))
