"""Gradients that don't add up over shards, though the losses do, are refused; others are not."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from checked import CLASSES, X, Y, train
from evenstep.errors import ContractError
from taking_turns import in_turn


class Attach(torch.autograd.Function):
    """Gives a term the gradient 1 when the output's gradient comes back, whatever that is."""

    @staticmethod
    def forward(ctx, output, term):
        ctx.shape, ctx.dtype = term.shape, term.dtype
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(ctx.shape, dtype=ctx.dtype)


class Balanced(nn.Module):
    """Experts behind a gate, whose balance is a term of its own while it trains."""

    def __init__(self, attach):
        super().__init__()
        self.attach = attach
        self.gate, self.experts = nn.Linear(6, 2), nn.Linear(6, 2 * CLASSES)

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        output = (self.experts(x).view(-1, 2, CLASSES) * shares[:, :, None]).sum(1)
        if not self.training:
            return output
        return self.attach(output, 0.01 * shares.mean(0).square().sum())


def attached_by_a_backward_pass(output, term):
    term.backward(retain_graph=True)
    return output


class Linear(nn.Linear):
    """A layer whose output's gradient passes through a function."""

    def __init__(self, function):
        super().__init__(6, CLASSES)
        self.function = function

    def forward(self, x):
        return Through.apply(super().forward(x), self.function)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.function(gradient), None


class Embedded(nn.Module):
    """Looks some rows of a table up, whose gradient is sparse."""

    def __init__(self, function=None):
        super().__init__()
        self.table = nn.Embedding(32, CLASSES, sparse=True)
        self.function = function or (lambda gradient: gradient)

    def forward(self, x):
        return Through.apply(self.table((x * 5).long() % 32).sum(1), self.function)


class Hooked(nn.Linear):
    """A layer with a hook on its output."""

    def __init__(self, hook):
        super().__init__(6, CLASSES)
        self.hook = hook

    def forward(self, x):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(self.hook)
        return x


OWN = {
    "function": (lambda: Balanced(Attach.apply), "Attach, which does not depend on .* gives gate"),
    "backward": (
        lambda: Balanced(attached_by_a_backward_pass),
        "a backward pass inside the forward pass or the objective gives gate.weight a",
    ),
    "hook": (lambda: Hooked(lambda g: g + 0.1), "a hook on .* gives weight a gradient"),
}
OTHER = {
    "by examples": (lambda: Linear(lambda g: g / len(g)), "that of (weight|bias) for some"),
    "by the norm": (lambda: Linear(lambda g: g / (1 + 99 * g.norm())), "that of (weight|bias) for"),
    "sparse": (lambda: Embedded(lambda g: g / len(g)), "that of table.weight for some"),
    "hook by the norm": (lambda: Hooked(lambda g: g / g.norm()), "that of .*before_update="),
}
REFUSED = OWN | OTHER


@in_turn("name", REFUSED)
def test_gradients_that_do_not_add_up_are_refused(name, devices):
    torch.manual_seed(1)
    build, words = REFUSED[name]
    with pytest.raises(ContractError, match=f"gradients don't add up over the shards.*{words}"):
        train(build(), devices=devices)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("options", [{"shards": 1}, {"separable": False}], ids=str)
def test_one_shard_or_a_promise_given_up_takes_them(name, options):
    train(REFUSED[name][0](), **options)


class Attention(nn.Module):
    """The gradient of the keys' bias is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = x.view(-1, 1, 6) * torch.linspace(-1, 1, 5).view(1, 5, 1)
        return self.head(self.norm(self.attention(x, x, x)[0]).mean(1))


class Checkpointed(nn.Linear):
    def forward(self, x):
        x = x.requires_grad_()
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)


GOOD = {
    "limits by row": lambda: Linear(lambda g: g.clamp(-1e-3, 1e-3)),
    "reversed": lambda: Linear(lambda g: -0.5 * g),
    "attention": Attention,
    "in double": lambda: nn.Sequential(Double(), nn.Linear(6, CLASSES).double()),
    "in bfloat16": lambda: nn.Linear(6, CLASSES).bfloat16(),
    "sparse": Embedded,
    "checkpoint": lambda: Checkpointed(6, CLASSES),
    "kinks": lambda: nn.Sequential(*[nn.Linear(6, 6), nn.ReLU()] * 8, nn.Linear(6, CLASSES)),
    "hook by row": lambda: Hooked(lambda g: g / (1 + g.norm(dim=1, keepdim=True))),
}


class Double(nn.Module):
    def forward(self, x):
        return x.double()


@pytest.mark.parametrize("name", GOOD)
def test_gradients_that_add_up_are_taken(name):
    torch.manual_seed(1)
    model = GOOD[name]()
    batch = (X.bfloat16(), Y) if name == "in bfloat16" else (X, Y)
    _, report = train(model, batches=[batch] * 2)
    assert not report.unjudged
