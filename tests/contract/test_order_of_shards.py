"""State that is passed from shard to shard is refused by name, also where it has no effect yet."""

import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from checked import CLASSES, X, Y, everywhere, net, train
from evenstep.errors import ContractError, WrongSumError
from evenstep.shard import forward_backward
from shared_gradients import Positions
from taking_turns import in_turn
from zoo import make_batches


class Statistics:
    """A plain object that holds a tensor."""

    mean = None


class Normalising(nn.Module):
    """Normalises by a state of its own, as `follow(old, new)` gives it; `gate` weighs it."""

    def __init__(self, follow, gate=1.0):
        super().__init__()
        self.layer, self.follow = nn.Linear(6, CLASSES), follow
        self.mean = None
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x):
        new = x.detach().mean(0)
        self.mean = new if self.mean is None else self.follow(self.mean, new)
        return self.layer(x - self.gate * self.mean)


class InAnObject(nn.Module):
    """Keeps the first mean that it sees in a plain object; it has no effect yet."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(6, CLASSES), Statistics()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        if self.kept.mean is None:
            self.kept.mean = x.detach().mean(0)
        return self.layer(x - self.gate * self.kept.mean)


FOLLOW = {
    "the first value seen": lambda old, new: old,
    "a running maximum": torch.maximum,
    "a running minimum": torch.minimum,
    "half old, half new": lambda old, new: (old + new) / 2,
    "a running mean": lambda old, new: 0.9 * old + 0.1 * new,
}


@pytest.mark.parametrize("gate", [1.0, 0.0])
@in_turn("name", FOLLOW)
def test_state_from_shard_to_shard_is_refused_by_name(name, gate, devices):
    with pytest.raises(ContractError, match=r"model\.mean.*shard.*keep it in a buffer"):
        train(Normalising(FOLLOW[name], gate), devices=devices)


@pytest.mark.parametrize("check", ["first", "every 1"])
def test_state_in_a_plain_object_is_refused_by_name(check):
    with pytest.raises(ContractError, match=r"model\.kept"):
        train(InAnObject(), check=check)


class Slotted:
    __slots__ = ("mean",)

    def __init__(self):
        self.mean = 0.0


class InSlots(nn.Module):
    """Keeps a running mean in an object that has slots instead of a `__dict__`."""

    def __init__(self):
        super().__init__()
        self.net, self.state = net(), Slotted()

    def forward(self, x):
        self.state.mean = 0.9 * self.state.mean + 0.1 * float(x.mean())
        return self.net(x)


class Registers(nn.Module):
    """Registers a buffer with the first values that it sees, or with a table."""

    def __init__(self, value):
        super().__init__()
        self.net, self.value = net(), value

    def forward(self, x):
        if not hasattr(self, "first"):
            self.register_buffer("first", self.value(x))
        return self.net(x)


@pytest.mark.parametrize(
    ("make", "name"),
    [(InSlots, "model.state"), (lambda: Registers(lambda x: x.mean(0)), "model.first")],
)
def test_state_in_slots_and_in_registered_buffers_is_refused_by_name(make, name):
    with pytest.raises(ContractError, match=rf"{name} has a different value after a shard"):
        train(make())


def test_a_table_that_the_first_shard_registers_is_fine():
    train(Registers(lambda x: torch.arange(6.0)))


def test_counting_and_noting_shards_is_fine():
    class Diary(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            self.norms.append(float(x.norm()))
            return super().forward(x)

    model = Diary(6, CLASSES)
    model.norms = []
    train(model, batches=[(X, Y)] * 4)
    assert model.calls == len(model.norms) == 4 * 8


class Counting(nn.Linear):
    """Counts the shards that it has computed, and computes by the count as `use` says."""

    def __init__(self, use, zero=0):
        super().__init__(6, CLASSES)
        self.use, self.calls = use, zero

    def forward(self, x):
        self.calls = self.calls + 1
        return self.use(self, super().forward(x))


def warms_up(model, output):
    return output * (2.0 if model.calls > 100 else 1.0)


def stops_learning(model, output):
    return output.detach() + 0 * output if model.calls > 10_000 else output


def begins_once(model, output):
    if model.calls == 1:
        model.scale = 3.0
    return output * model.scale


def logs(model, output):
    if model.calls % 100 == 0:
        model.mean = 1.0
    return output


def every(nth):
    return lambda model, output: output * (2.0 if model.calls % nth == 0 else 1.0)


TENSOR = torch.zeros((), dtype=torch.int64)
COUNTS = {
    "warms up": (warms_up, 0),
    "stops learning": (stops_learning, TENSOR),
    "every 7th": (every(7), TENSOR),
    "every 50th": (every(50), 0),
    "every 64th": (every(64), 0),
    "every 1000th": (every(1000), TENSOR),
    "warms up, in a tensor": (warms_up, TENSOR),
}


@in_turn("name", COUNTS)
def test_a_count_that_will_decide_is_refused_by_name(name, devices):
    with pytest.raises(ContractError, match=r"model\.calls"):
        train(Counting(*COUNTS[name]), devices=devices)


class Tally:
    def __init__(self):
        self.calls = 0


HOLDERS = {
    "a dict": ({"calls": 0}, "calls", operator.itemgetter("calls"), operator.setitem),
    "a list": ([0], 0, operator.itemgetter(0), operator.setitem),
    "an object": (Tally(), "calls", operator.attrgetter("calls"), setattr),
}


class CountingInside(nn.Linear):
    """Counts in what an attribute holds; every 50th shard decides, or none."""

    def __init__(self, holder, key, read, write, *, decides):
        super().__init__(6, CLASSES)
        self.held = {"inside": copy.deepcopy(holder)}
        self.how, self.decides = (key, read, write), decides

    def forward(self, x):
        key, read, write = self.how
        before = read(self.held["inside"])
        write(self.held["inside"], key, before + 1)
        return super().forward(x) * (2.0 if self.decides and before % 50 == 0 and before else 1.0)


@in_turn("name", HOLDERS)
def test_a_count_inside_of_what_an_attribute_holds_is_refused_if_it_will_decide(name, devices):
    holder = HOLDERS[name]
    with pytest.raises(ContractError, match=r"model\.held\.inside\.(calls|0)"):
        train(CountingInside(*holder, decides=True), devices=devices)
    model = CountingInside(*holder, decides=False)
    train(model, devices=devices)
    assert holder[2](model.held["inside"]) <= 8 * 8  # what was tried out is not left


@in_turn("use", [begins_once, logs])
def test_a_count_that_decides_nothing_is_fine(use, devices):
    model = Counting(use)
    model.scale = 1.0
    train(model, devices=devices)


@everywhere
def test_the_largest_number_of_a_shard_so_far_is_refused_by_name(devices):
    class Largest(nn.Linear):
        most = 0

        def forward(self, x):
            self.most = max(self.most, int(x[0].abs().sum() * 100))
            return super().forward(x) * (1 + self.most / 1000)

    order = X.abs().view(8, 4, 6)[:, 0].sum(1).sort(descending=True).indices
    falling = X.view(8, 4, 6)[order].reshape(32, 6)
    for batch in (falling, falling.flip(0)):
        with pytest.raises(ContractError, match=r"model\.most"):
            train(Largest(6, CLASSES), batches=[(batch, Y)] * 2, devices=devices)


class Router(nn.Module):
    """Two experts, and a loss for their balance over the batch, behind a router at zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(6, CLASSES) for _ in range(2)])
        self.router = nn.Linear(6, 2)
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        self.balance = (shares.mean(0) ** 2).sum()
        return sum(share[:, None] * one(x) for share, one in zip(shares.T, self.experts))  # noqa: B905


def balanced(model, X, y):
    loss = F.cross_entropy(model(X), y, reduction="sum")
    return loss + 10 * len(y) * model.balance, len(y)


@everywhere
def test_a_term_behind_a_router_at_zero_is_refused_after_the_first_update(devices):
    with pytest.raises(ContractError, match="does not add up"):
        train(Router(), balanced, batches=[(X, Y)] * 8, devices=devices)


def test_what_is_kept_outside_the_model_is_found_between_two_shards():
    kept = {}

    def objective(model, X, y):
        mean = X.mean(0)
        kept["mean"] = (kept.get("mean", mean) + mean) / 2
        return F.cross_entropy(model(X - kept["mean"]), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match="gives two results"):
        train(net(), objective)


class Caching(nn.Module):
    """Keeps what depends on shapes alone, and what each shard writes before it reads it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, CLASSES)
        self.places, self.by_size = None, {}

    def forward(self, x):
        if self.places is None or len(self.places) < x.shape[1]:
            self.places = torch.arange(x.shape[1]) / 10
        self.by_size.setdefault(len(x), torch.ones(len(x), 1))
        self.hidden = self.layer((x + self.places) * self.by_size[len(x)])
        self.norm = float(self.hidden.detach().norm())
        return self.hidden


@in_turn("size", [32, 33, 9, 8])
def test_caches_and_what_a_shard_writes_first_are_fine(size, devices):
    batch = torch.randn(size, 6), torch.arange(size) % CLASSES
    train(Caching(), batches=[batch] * 4, devices=devices)


def test_a_model_that_cannot_be_copied_trains_on_one_device():
    class Uncopied(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("a lock")

    _, report = train(Uncopied(6, CLASSES), batches=[(X, Y)] * 4)
    assert report.unjudged == ""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_wrong_sum_of_gradients_ends_the_training(devices, monkeypatch):
    """The fault is planted again: gradients stay in the memory that they share."""
    monkeypatch.setattr(forward_backward, "with_own_memory", lambda gradient: gradient)
    torch.manual_seed(0)
    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = make_batches([16])
    with (
        evenstep.Trainer(
            model, optimizer, functools.partial(F.cross_entropy), devices=devices
        ) as trainer,
        pytest.raises(WrongSumError, match=r"gradients of (rows|columns) differs"),
    ):
        trainer.step(*batch)
    assert trainer.steps_done == 0
