"""Optimizers that wrap another one, most without calling torch's constructor, as copies do."""

import functools
import re
from collections import defaultdict

import pytest
import torch
from torch import nn

import evenstep
from evenstep.checkpoint.fingerprint import fingerprint_2
from evenstep.errors import ContractError, ModelError
from grouping import grouped
from layouts import own
from reference import assert_same_bits, reference_training, whole_state
from zoo import build, make_batches

LOSS = nn.CrossEntropyLoss()
BATCHES = make_batches((24, 17, 24, 9, 16))


class Lookahead(torch.optim.Optimizer):
    """Keeps its settings in the groups of the fast optimizer, its slow weights in `state`."""

    def __init__(self, base_optimizer, alpha=0.5, k=2):
        defaults = {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0}
        self.base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.defaults.update(defaults)
        self.state = defaultdict(dict)
        for group in self.param_groups:
            for name, default in defaults.items():
                group.setdefault(name, default)

    def step(self, closure=None):
        loss = self.base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                self.update_slow(group)
        return loss

    def update_slow(self, group):
        for fast in group["params"]:
            if fast.grad is None:
                continue
            state = self.state[fast]
            if "slow" not in state:
                state["slow"] = fast.data.clone()
            slow = state["slow"]
            slow.add_(fast.data - slow, alpha=group["lookahead_alpha"])
            fast.data.copy_(slow)

    def state_dict(self):
        fast = self.base_optimizer.state_dict()
        slow = {(id(k) if isinstance(k, torch.Tensor) else k): v for k, v in self.state.items()}
        return {"state": fast["state"], "slow": slow, "param_groups": fast["param_groups"]}

    def load_state_dict(self, state_dict):
        fast = {"state": state_dict["state"], "param_groups": state_dict["param_groups"]}
        self.base_optimizer.load_state_dict(fast)
        slow = {"state": state_dict["slow"], "param_groups": state_dict["param_groups"]}
        super().load_state_dict(slow)
        self.param_groups = self.base_optimizer.param_groups


class Counting(torch.optim.Optimizer):
    """Has neither `defaults` nor a `state_dict` of its own, and a setting outside of its groups."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for fast in group["params"] if group["counter"] == 0 else ():
                slow = self.state[fast].setdefault("slow", fast.data.clone())
                slow += (fast.data - slow) * self.alpha
                fast.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % self.k
        return loss


class Proxied(torch.optim.Optimizer):
    """Shows the inner optimizer's groups and state as its own, as Accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(
        lambda self: self.optimizer.state, lambda self, new: setattr(self.optimizer, "state", new)
    )
    param_groups = property(
        lambda self: self.optimizer.param_groups,
        lambda self, new: setattr(self.optimizer, "param_groups", new),
    )
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure=None):
        self.optimizer.step(closure)


class Delegating(Proxied):
    """Looks up everything else in the inner optimizer."""

    def __getattr__(self, name):
        return getattr(self.__dict__["optimizer"], name)


class Holding(torch.optim.Optimizer):
    """As sharpness-aware minimisation is written: the inner optimizer has a state of its own."""

    def __init__(self, optimizer):
        super().__init__([*optimizer.param_groups[0]["params"]], optimizer.defaults)
        self.base_optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        self.base_optimizer.step()


class Nested(torch.optim.Optimizer):
    """Keeps its inner optimizer in a list, and has groups of its own."""

    def __init__(self, optimizer):
        super().__init__([*optimizer.param_groups[0]["params"]], optimizer.defaults)
        self.parts = [optimizer]

    def step(self, closure=None):
        self.parts[0].step()


def accelerated(optimizer):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(optimizer)


WRAPPERS = [Lookahead, Counting, Proxied, Delegating, Holding, Nested, accelerated]
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda one: one.__name__)


@pytest.fixture(autouse=True)
def classes_as_they_were():
    """Torch's `load_state_dict` wraps the `step` of a class, which ends with the test."""
    before = {kind: vars(kind)["step"] for kind in WRAPPERS if "step" in vars(kind)}
    yield
    for kind, step in before.items():
        kind.step = step


def made(wrap, parameters):
    return wrap(torch.optim.Adam(parameters, lr=0.01))


def train(trainer, batches=BATCHES):
    with trainer:
        return [float(trainer.step(X, y)) for X, y in batches]


@every_wrapper
@pytest.mark.thinned(2)
def test_every_layout_gives_what_the_plain_loop_gives(wrap):
    make = functools.partial(made, wrap)
    expected, losses = reference_training(build("convolution"), make, BATCHES, shards=8)
    for devices in (1, 2, 3, own(2)):
        model = build("convolution")
        optimizer = make(model.parameters())
        options = {"devices": devices, "memory_format": "contiguous"}
        assert train(evenstep.Trainer(model, optimizer, LOSS, **grouped(**options))) == losses
        assert_same_bits(whole_state(model, optimizer), expected)
    assert losses[0] != losses[-1]


@every_wrapper
@pytest.mark.thinned(2)
def test_a_resumed_training_is_the_uninterrupted_one(wrap, tmp_path):
    """Copies of Lookahead save their slow weights by `id`, which a new program can't find."""
    ends = []
    for stop in (None, 3):
        model = build("convolution")
        optimizer = made(wrap, model.parameters())
        trainer = evenstep.Trainer(model, optimizer, LOSS, devices=1)
        train(trainer, BATCHES[:stop])
        if stop:
            trainer.save(tmp_path)
            model = build("convolution", 7)
            optimizer = made(wrap, model.parameters())
            trainer = evenstep.Trainer.load(tmp_path, model, optimizer, LOSS, devices=2)
            if wrap in (Lookahead, Holding):
                assert optimizer.param_groups is optimizer.base_optimizer.param_groups
            train(trainer, BATCHES[stop:])
        ends.append(fingerprint_2(model, optimizer))
    assert ends[0] == ends[1]


@every_wrapper
def test_a_step_beside_the_trainers_is_refused(wrap):
    model = build("convolution")
    optimizer = made(wrap, model.parameters())
    with evenstep.Trainer(model, optimizer, LOSS, devices=1) as trainer:
        trainer.step(*BATCHES[0])
        with pytest.raises(ContractError, match="was called while a trainer is open"):
            optimizer.step()
        trainer.backward(*BATCHES[1])
        optimizer.step()
        trainer.step(*BATCHES[2])
    optimizer.step()


@every_wrapper
def test_another_optimizer_of_the_class_stays_usable(wrap):
    model, other = build("convolution"), nn.Linear(2, 1)
    outside = made(wrap, other.parameters())
    train(evenstep.Trainer(model, made(wrap, model.parameters()), LOSS, devices=1))
    other(torch.ones(3, 2)).sum().backward()
    before = other.weight.detach().clone()
    outside.step()
    assert not other.weight.equal(before)


@pytest.mark.parametrize(
    ("wrap", "inner", "options"),
    [
        (Lookahead, "Lookahead.base_optimizer", {"max_in_flight": 2}),
        (Lookahead, "Lookahead.base_optimizer", {"divide": evenstep.Owners()}),
        (Holding, "base_optimizer", {"max_in_flight": 2}),
        (Nested, "parts.0", {"max_in_flight": 2}),
    ],
)
def test_layouts_that_need_an_unwrapped_optimizer_name_the_inner_one(wrap, inner, options):
    model = build("convolution")
    optimizer = made(wrap, model.parameters())
    with (
        pytest.raises((ContractError, ModelError), match=rf"{re.escape(inner)} is an opt"),
        evenstep.Trainer(model, optimizer, LOSS, **grouped(devices=2, **options)),
    ):
        pass


class Bare(torch.optim.Optimizer):
    """A rule of the user's own, whose constructor forgets torch's."""

    def __init__(self, parameters):
        self.param_groups, self.state = [{"params": [*parameters]}], defaultdict(dict)

    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            one.data.sub_(one.grad, alpha=0.1)


class Empty(torch.optim.Optimizer):
    """Has no groups."""

    def __init__(self, parameters):
        self.base = torch.optim.SGD(parameters, lr=0.1)

    def step(self, closure=None):
        self.base.step(closure)


@pytest.mark.parametrize("kind", [Bare, Empty])
def test_an_optimizer_that_is_not_whole_is_refused_by_name(kind):
    model = build("convolution")
    with pytest.raises(ModelError, match=rf"{kind.__name__}.*super\(\).__init__\("):
        evenstep.Trainer(model, kind(model.parameters()), LOSS, devices=1)


# ---- schedulers


def a_step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def chained(optimizer):
    return torch.optim.lr_scheduler.ChainedScheduler([a_step_lr(optimizer), a_step_lr(optimizer)])


def sequential(optimizer):
    parts = [a_step_lr(optimizer), a_step_lr(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.parametrize(
    "make", [a_step_lr, chained, sequential, torch.optim.lr_scheduler.ReduceLROnPlateau]
)
@pytest.mark.parametrize("scheduled", ["inner", "outer"])
@pytest.mark.parametrize("trained", ["inner", "outer"])
def test_a_scheduler_may_belong_to_the_inner_or_to_the_outer_optimizer(make, scheduled, trained):
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = {"inner": inner, "outer": Lookahead(inner)}
    evenstep.Trainer(
        model, optimizers[trained], LOSS, devices=1, scheduler=make(optimizers[scheduled])
    )
