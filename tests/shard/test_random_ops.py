"""Random numbers in odd places: a training has the bits of the plain loop, in every step."""

import functools
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenstep.errors import ModelError
from layouts import own
from reference import assert_same_bits, reference_training, whole_state
from trainers import open_trainer
from zoo import CLASSES, make_batches

SGD = functools.partial(torch.optim.SGD, lr=0.1)
BATCHES = make_batches((24, 11, 17, 24))
LATE = [(X * 100 if number >= 2 else X, y) for number, (X, y) in enumerate(BATCHES)]
"""The same batches; the shards of the third and fourth know that they are late."""


def is_late(x):
    return bool(x.abs().max() > 20)


# ---- draws in the backward pass


def add_noise(gradient):
    return gradient * (1 + torch.randn(gradient.shape))


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return F.dropout(gradient, 0.5) * torch.ops.aten.rand_like.default(gradient)


class InsideBackward(torch.autograd.Function):
    """Its backward pass runs a backward pass through dropout, as reversible layers do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = F.dropout(torch.tanh(x), 0.5)
        return torch.autograd.grad(y, x, gradient)[0]


def hooked(x):
    x.register_hook(add_noise)
    return x


class NoisyBackward(nn.Module):
    """A layer whose gradient has noise; its forward pass may draw too."""

    def __init__(self, noisy, *, rate=0.0):
        super().__init__()
        self.noisy, self.rate = noisy, rate

    def forward(self, x):
        x = self.noisy(x * 1)
        return F.dropout(x, self.rate) if self.rate else x


class LateNoise(NoisyBackward):
    def forward(self, x):
        late = is_late(x)
        x = F.dropout(torch.tanh(x), self.rate) if self.rate else torch.tanh(x)
        return self.noisy(x) if late else x


def layer_with_a_hook():
    layer = nn.Tanh()
    layer.register_full_backward_hook(lambda module, inputs, outputs: (add_noise(inputs[0]),))
    return layer


class HidesDraws(nn.Module):
    """Draws, and restores the default generator in its backward pass.

    Lanes that recompute side by side can do the same: the last one to end restores what it found.
    """

    def forward(self, x):
        state = torch.get_rng_state()
        x = x * 1
        x.register_hook(lambda gradient: torch.set_rng_state(state))
        return F.dropout(x, 0.5)


BACKWARD = {
    "a tensor's hook": lambda: NoisyBackward(hooked),
    "a tensor's hook, and dropout": lambda: NoisyBackward(hooked, rate=0.4),
    "a function": lambda: NoisyBackward(NoisyGradient.apply),
    "a function, and dropout": lambda: NoisyBackward(NoisyGradient.apply, rate=0.4),
    "a backward pass in a function": lambda: NoisyBackward(InsideBackward.apply),
    "a layer's hook": layer_with_a_hook,
    "a hook that hides draws": HidesDraws,
    "from the third step on": lambda: LateNoise(hooked),
    "from the third step on, and dropout": lambda: LateNoise(hooked, rate=0.4),
}


# ---- draws that are computed again


class Checkpointed(nn.Module):
    """A block, with dropout if nothing else is given, computed again in the backward pass."""

    def __init__(self, *layers, only_late=False, **options):
        super().__init__()
        layers = layers or [nn.Dropout(0.5)]
        self.block = nn.Sequential(nn.Linear(36, 36), nn.Tanh(), *layers)
        self.only_late, self.options = only_late, options

    def forward(self, x):
        if self.only_late and not is_late(x):
            return self.block[:2](x)
        return checkpoint(self.block, x.requires_grad_(), **self.options)


class Nested(nn.Module):
    """A block that is computed again, inside one that is."""

    def __init__(self):
        super().__init__()
        self.inner = Checkpointed(use_reentrant=False)

    def forward(self, x):
        return checkpoint(lambda x: F.dropout(self.inner(x), 0.3), x, use_reentrant=False)


class SelfAttention(nn.Module):
    """Which could draw, and does not."""

    def forward(self, x):
        x = x.reshape(len(x), 1, 6, 6)
        return F.scaled_dot_product_attention(x, x, x).flatten(1)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand(36) + torch.randperm(36)


def attending(*before):
    return Checkpointed(*before, SelfAttention(), use_reentrant=False)


RECOMPUTED = {
    "not random": attending,
    "not random, beside dropout": lambda: nn.Sequential(attending(), nn.Dropout(0.5)),
    "not random, beside noise": lambda: nn.Sequential(attending(), Noise()),
    "a rate of zero": lambda: attending(nn.Dropout(0.0)),
    "reentrant": lambda: Checkpointed(use_reentrant=True),
    "not reentrant": lambda: Checkpointed(use_reentrant=False),
    "reentrant, beside dropout": lambda: nn.Sequential(
        nn.Dropout(0.2), Checkpointed(use_reentrant=True), nn.Dropout(0.2)
    ),
    "not reentrant, beside dropout": lambda: nn.Sequential(
        nn.Dropout(0.2), Checkpointed(use_reentrant=False), nn.Dropout(0.2)
    ),
    "with other numbers": lambda: Checkpointed(use_reentrant=True, preserve_rng_state=False),
    "nested": Nested,
    "from the third step on": lambda: Checkpointed(use_reentrant=False, only_late=True),
    "from the third step on, and dropout": lambda: nn.Sequential(
        Checkpointed(use_reentrant=True, only_late=True), nn.Dropout(0.2)
    ),
}


# ---- draws after seeding, and by ops that take no generator


class SeedsItself(nn.Module):
    """The same noise in every shard, and the default generator as if nothing had been drawn."""

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            noise = torch.rand_like(x)
        return x + noise


class SeedsForGood(nn.Module):
    def forward(self, x):
        before = torch.rand(())
        torch.manual_seed(5)
        return F.dropout(x * before, 0.5) + torch.initial_seed()


class PutsBack(nn.Module):
    """Draws the same numbers twice."""

    def forward(self, x):
        state = torch.get_rng_state()
        x = F.dropout(x, 0.5)
        torch.set_rng_state(state)
        return F.dropout(x, 0.5) * torch.rand(36)


class NativeDropout(nn.Module):
    def forward(self, x):
        return torch.native_dropout(x, 0.5, True)[0]


@torch.library.custom_op("evenstep_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


noise.register_autograd(lambda ctx, gradient: gradient)


class OwnOp(nn.Module):
    def forward(self, x):
        return noise(x)


SEEDED = {
    "fork_rng": SeedsItself,
    "fork_rng, beside dropout": lambda: nn.Sequential(nn.Dropout(0.5), SeedsItself()),
    "manual_seed": SeedsForGood,
    "set_rng_state": PutsBack,
    "native_dropout": NativeDropout,
    "an op of the user's own": OwnOp,
}


CASES = {
    **{f"backward: {name}": make for name, make in BACKWARD.items()},
    **{f"computed again: {name}": make for name, make in RECOMPUTED.items()},
    **{f"seeded: {name}": make for name, make in SEEDED.items()},
}


def built(make):
    torch.manual_seed(0)
    layer = make()
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 36), layer, nn.Linear(36, CLASSES))


def trained(model, batches, devices, **options):
    with open_trainer(
        model, optimizer=SGD(model.parameters()), devices=devices, **options
    ) as trainer:
        losses = [trainer.step(X, y) for X, y in batches]
        trainer.waitall()
    return whole_state(model, trainer.optimizer), [float(value) for value in losses]


@functools.cache
def expected(name, shards):
    return reference_training(built(CASES[name]), SGD, LATE, shards=shards)


LAYOUTS = {
    "one shard": {"devices": 1, "shards": 1},
    "one device": {"devices": 1},
    "in flight": {"devices": 3, "max_in_flight": 2},
    "own memory": {"devices": own(2)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(3)
def test_every_step_draws_as_the_plain_loop_does(name, layout):
    options = LAYOUTS[layout]
    reference, reference_losses = expected(name, options.get("shards", 8))
    model = built(CASES[name])
    before = torch.get_rng_state()
    state, losses = trained(model, LATE, **options)
    assert_same_bits(state, reference)
    assert losses == reference_losses
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.thinned(3)
def test_the_users_own_thread_draws_beside_a_training(name, devices):
    """Its numbers and the shards' are those that they would be without each other."""
    model = built(SEEDED[name])
    done, drawn = threading.Event(), []

    def draw():
        while not done.is_set():
            drawn.append(torch.rand(2))

    with open_trainer(model, optimizer=SGD(model.parameters()), devices=devices) as trainer:
        torch.manual_seed(11)
        drawing = threading.Thread(target=draw)
        drawing.start()
        try:
            losses = [trainer.step(*batch) for batch in LATE]
        finally:
            done.set()
            drawing.join()
    torch.manual_seed(11)
    assert drawn
    assert all(torch.equal(one, torch.rand(2)) for one in drawn)
    reference, reference_losses = expected(f"seeded: {name}", 8)
    assert_same_bits(whole_state(model, trainer.optimizer), reference)
    assert [float(value) for value in losses] == reference_losses


class NestedDeeply(nn.Module):
    """Blocks that are computed again, each inside the one before."""

    def __init__(self, depth):
        super().__init__()
        self.depth, self.head = depth, nn.Linear(36, CLASSES)

    def block(self, x, depth):
        if depth == 0:
            return F.dropout(self.head(x), 0.1)
        return checkpoint(self.block, x, depth - 1, use_reentrant=True)

    def forward(self, x):
        return self.block(x.flatten(1).requires_grad_(), self.depth)


@pytest.mark.slow
def test_numbers_that_a_thread_of_autograds_own_would_draw_are_refused():
    """Torch computes more than 60 nested backward passes in other threads.

    In a process of its own: one that has had such threads can't be forked any more.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        for check in ("first", "off"):
            trained(NestedDeeply(10), BATCHES, 2, check=check)
            refused = process.submit(trained, Nested(70), BATCHES, 2, check=check)
            with pytest.raises(ModelError, match="use_reentrant=False"):
                refused.result()


# ---- functions that the user has compiled


class Compiled(nn.Module):
    """A compiled block, with dropout in it or beside it."""

    def __init__(self, block, rate):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(36) + 0.1)
        self.block, self.rate = block, rate

    def forward(self, x):
        return F.dropout(self.block(x, self.weight, self.training), self.rate)


def drops(x, weight, training):
    return F.dropout(torch.tanh(x @ weight), 0.5, training)


def always_drops(x, weight, training):
    return F.dropout(torch.tanh(x @ weight), 0.5)


def sums(x, weight, training):
    return torch.tanh(x @ weight).exp().sum(-1, keepdim=True) * x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's, about torch
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("block", "rate"),
    [(drops, 0.0), (always_drops, 0.0), (sums, 0.3)],
    ids=["inside", "always", "beside"],
)
def test_a_function_that_the_user_has_compiled_stays_compiled(block, rate, devices):
    """Compiled code rounds in its own way; so it must not depend on whether draws were seen."""
    torch._dynamo.reset()
    compiled = torch.compile(block, dynamic=False, fullgraph=True)
    model = built(lambda: Compiled(compiled, rate))
    batches = [(X, y) for X, y in BATCHES if len(X) == 24]  # few sizes, few programs
    reference, reference_losses = reference_training(model, SGD, batches, shards=8)
    state, losses = trained(model, batches, devices)
    assert_same_bits(state, reference)
    assert losses == reference_losses
