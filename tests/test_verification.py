"""`verify`: models whose training is the same on any devices, and models whose training is not."""

import random
import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evenstep.data import Loader
from evenstep.engine import InlineLanes
from evenstep.errors import InputError
from evenstep.models import mlp
from evenstep.options import Faults
from evenstep.training.trainer import Trainer
from evenstep.verification import LayoutResult, verify
from grouping import grouped
from layouts import mixed, own, shared

STEPS = 3
SHARDS = 8
FIRST_GRADIENT = "gradient of first.weight"


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 3)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


class Dropped(Plain):
    """Draws random numbers with torch, which evenstep seeds."""

    def forward(self, x):
        return torch.dropout(super().forward(x), 0.5, self.training)


class DrawsFromRandom(Plain):
    def forward(self, x):
        return super().forward(x) * (1 + random.random())


class CountsItsCalls(Plain):
    """Each replica has its own count, which depends on the shards that its device computed."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return super().forward(x) * len(self.calls)


class CountsInABuffer(CountsItsCalls):
    """The same, but only a buffer depends on the count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sum", torch.zeros(()))

    def forward(self, x):
        self.calls.append(1)
        self.sum += len(self.calls)
        return Plain.forward(self, x)


class GoesWrongAt(Plain):
    """Multiplies its output by `factor` in the forward pass number `call`."""

    def __init__(self, call, factor):
        super().__init__()
        self.call = call
        self.factor = factor
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (self.factor if self.calls == self.call + 1 else 1)


def unchecked(model, optimizer, devices):
    """Return a trainer that takes what the check of a step would refuse."""
    off = Faults(check="off")
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices, faults=off)


def batches(trainer):
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(23, 6, generator=generator)
        yield x, torch.randint(3, (23,), generator=generator)


def maker(network, **options):
    def make_trainer(devices):
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        given = {"devices": devices, "shards": SHARDS, "check": "off", **options}
        return Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**given))

    return make_trainer


def plain_fingerprints(devices, steps):
    """Train without `verify`, and take the fingerprints by hand."""
    taken = []
    with maker(Dropped)(devices) as trainer:
        for _, batch in zip(range(steps), batches(trainer), strict=False):
            trainer.step(*batch)
            taken.append(trainer.fingerprint())
    return tuple(taken)


def test_a_model_that_keeps_the_promise_is_identical_on_every_layout():
    verdict = verify(maker(Dropped), batches, [shared(1), own(2), mixed(3), 5], STEPS)
    assert verdict.identical
    assert verdict.difference is None
    expected = plain_fingerprints(shared(1), STEPS)
    assert [result.fingerprints for result in verdict.results] == [expected] * 4
    assert verdict.fingerprints == (expected[-1],) * 4
    assert len(set(expected)) == STEPS


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("layer", r"layer first Tanh\(\) instead of Linear\("),
        ("rate", r"lr of the optimizer 0\.2 instead of 0\.1"),
        ("shards", "shards 4 instead of 8"),
    ],
)
def test_a_training_that_follows_the_devices_is_named(change, named):
    """The verdict was that results differ, and not why."""

    def make_trainer(devices):
        many = devices == 2
        torch.manual_seed(0)
        model = Plain()
        if many and change == "layer":
            model.first = nn.Tanh()
        rate = 0.2 if many and change == "rate" else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        shards = 4 if many and change == "shards" else 8
        return Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices, shards=shards)

    with pytest.raises(InputError, match=named):
        verify(make_trainer, batches, [1, 2], 1)


def test_each_result_is_reported_as_soon_as_it_is_known():
    seen = []
    verdict = verify(maker(Dropped), batches, [1, ["cpu:0", "cpu:1:own"]], 1, on_result=seen.append)
    assert tuple(seen) == verdict.results
    assert [result.devices for result in seen] == [("cpu:0",), ("cpu:0", "cpu:1:own")]
    assert all(isinstance(result, LayoutResult) for result in seen)


def test_random_in_forward_is_found_and_is_not_repeatable():
    verdict = verify(maker(DrawsFromRandom), batches, [1, 2], STEPS)
    assert not verdict.identical
    found = verdict.difference
    assert (found.step, found.shard, found.tensor) == (0, 0, FIRST_GRADIENT)
    assert found.layouts == (0, 1)
    assert not found.repeats


def test_python_state_of_a_replica_is_found_where_the_second_device_begins():
    verdict = verify(maker(CountsItsCalls), batches, [1, 2], STEPS)
    found = verdict.difference
    # In the replay it starts to count at shard 2: no shard is stolen.
    assert (found.step, found.shard, found.tensor) == (0, 2, FIRST_GRADIENT)


def test_which_device_computes_which_shard_of_an_observed_step_is_fixed():
    """Whatever the devices' speeds were in the steps before: so a replay names the same shard."""
    lanes = {}
    with maker(Plain)(2) as trainer:
        trainer.step(*next(iter(batches(trainer))))
        for lane, seconds in enumerate((1e-6, 1e3)):
            trainer._executor.pace.learn(lane, seconds)
        trainer.on_shard = lambda shard, _: lanes.update({shard: trainer._engine.lanes.here})
        trainer.step(*next(iter(batches(trainer))))
    assert [lanes[shard] for shard in range(SHARDS)] == [0, 0, 1, 1] * 2


def test_it_compares_with_the_first_layout_that_differs():
    verdict = verify(maker(CountsItsCalls), batches, [1, 1, 2, 4], STEPS)
    assert verdict.difference.layouts == (0, 2)
    assert verdict.results[0].fingerprints == verdict.results[1].fingerprints


def goes_wrong(call, factors):
    """Make trainers whose model, one after the other, has these factors."""
    factors = iter(factors)
    return maker(lambda: GoesWrongAt(call, next(factors)), lanes=InlineLanes)


def test_a_later_step_and_shard_are_found():
    step, shard = 1, 5
    make_trainer = goes_wrong(SHARDS * step + shard, [1, 2, 1, 2])  # two runs, then their replays
    found = verify(make_trainer, batches, [1, 1], STEPS).difference
    assert (found.step, found.shard, found.tensor) == (step, shard, FIRST_GRADIENT)
    assert found.repeats


def test_a_difference_that_does_not_come_back_is_said_to_be_unknown():
    make_trainer = goes_wrong(0, [1, 2, 1, 1])  # the second run goes wrong, neither replay does
    found = verify(make_trainer, batches, [1, 1], STEPS).difference
    assert (found.step, found.shard, found.tensor) == (0, None, None)
    assert not found.repeats


def test_a_buffer_is_named_when_the_gradients_agree():
    found = verify(maker(CountsInABuffer), batches, [1, 2], 1).difference
    assert (found.step, found.shard, found.tensor) == (0, 2, "buffer sum")


class HasAWrongPart(nn.Module):
    """Its second layer reads something besides its inputs; the first gradient is the first's."""

    def __init__(self):
        super().__init__()
        self.first, self.scaled = nn.Linear(6, 5), DrawsFromRandom()
        self.scaled.first = nn.Linear(5, 5)

    def forward(self, x):
        return self.scaled(self.first(x))


@pytest.mark.parametrize("layouts", [[1, 2], [1, 1], [1, own(2)], [2, mixed(3)]])
def test_the_module_where_the_replays_part_is_named(layouts):
    found = verify(maker(HasAWrongPart), batches, layouts, STEPS).difference
    assert (found.shard, found.tensor) == (0, FIRST_GRADIENT)
    assert found.seen.startswith(
        "scaled (DrawsFromRandom) has the same inputs and different outputs"
    )
    assert str(found).endswith(f"; not repeatable; {found.seen}")


def test_without_room_for_records_the_tensor_is_still_found(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no-such-folder")
    found = verify(maker(HasAWrongPart), batches, [1, 2], STEPS).difference
    assert (found.shard, found.tensor, found.seen) == (0, FIRST_GRADIENT, "")


def test_batches_that_differ_are_told_from_a_model_that_does():
    """Each training of the same steps has to see the same batches."""
    seeds = iter(range(9))

    def others(trainer):
        generator = torch.Generator().manual_seed(next(seeds))
        while True:
            x = torch.randn(23, 6, generator=generator)
            yield x, torch.randint(3, (23,), generator=generator)

    found = verify(maker(Plain), others, [1, 2], STEPS).difference
    assert found.seen == (
        "0 of 23 examples are the same; none of the examples of one is among those of the other"
    )


def test_what_the_tensor_says_already_is_not_said_twice():
    found = verify(maker(CountsInABuffer), batches, [1, 2], 1).difference
    assert (found.tensor, found.seen) == ("buffer sum", "")


def test_the_state_is_named_when_all_shards_agree():
    rates = iter([0.1, 0.2, 0.1, 0.2])

    def make_trainer(devices):
        torch.manual_seed(0)
        model = mlp(6, (4,), 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = next(rates)
        return unchecked(model, optimizer, devices)

    found = verify(make_trainer, batches, [1, 2], 1).difference
    assert (found.step, found.shard, found.tensor) == (0, None, "group/0/lr")
    assert found.repeats


def test_sparse_gradients_are_compared_too():
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 3, sparse=True)

        def forward(self, x):
            return self.table(x) * (1 + random.random())

    def tokens(trainer):
        while True:
            yield torch.arange(16) % 7, torch.arange(16) % 3

    def make_trainer(devices):
        torch.manual_seed(0)
        model = Embeds()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return unchecked(model, optimizer, devices)

    found = verify(make_trainer, tokens, [1, 2], 1).difference
    assert (found.shard, found.tensor) == (0, "gradient of table.weight")


@pytest.mark.parametrize(("layouts", "steps"), [([1], 3), ([], 3), ([1, 2], 0)])
def test_nothing_to_compare_is_refused(layouts, steps):
    with pytest.raises(InputError, match="at least 2 sets"):
        verify(maker(Dropped), batches, layouts, steps)


def test_too_few_batches_are_refused():
    def two(trainer):
        return [next(iter(batches(trainer)))] * 2

    with pytest.raises(InputError, match="got 2 batches for 3 steps: give more batches"):
        verify(maker(Dropped), two, [1, 2], 3)


def test_batches_may_be_a_loader_or_a_list():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(46, 6, generator=generator), torch.randint(3, (46,), generator=generator)
    loader = Loader(TensorDataset(x, y), 23)
    from_loader = verify(maker(Dropped), loader, steps=2)
    from_list = verify(maker(Dropped), [*loader], steps=2)
    assert from_loader.identical
    assert from_loader.fingerprints == from_list.fingerprints
    with pytest.raises(InputError, match="got 2 batches for 3 steps"):
        verify(maker(Dropped), loader)


def test_batches_that_can_be_iterated_once_only_are_refused():
    with pytest.raises(InputError, match="got batches as an iterator, which ends after one"):
        verify(maker(Dropped), iter([]))


def test_a_verdict_is_one_readable_line():
    verdict = verify(maker(Dropped), batches, [1, ["cpu:0", "cpu:1:own"]])
    assert str(verdict) == "identical after each of 3 steps on (cpu:0) and (cpu:0, cpu:1:own)"
    verdict = verify(goes_wrong(SHARDS + 5, [1, 2, 1, 2]), batches, [1, 1])
    assert str(verdict).startswith(
        f"(cpu:0) and (cpu:0) differ: step 1, shard 5, {FIRST_GRADIENT}; the model (GoesWrongAt) "
        f"has the same inputs and different outputs"
    )
    verdict = verify(goes_wrong(0, [1, 2, 1, 1]), batches, [1, 1])
    assert str(verdict).endswith(
        "step 0, all shards agree, no difference in the replay; not repeatable"
    )


class CountsCalls(nn.Module):
    """Has extra state that depends on the devices: how many shards this copy has computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


def test_extra_state_that_differs_is_a_difference():
    def make_trainer(devices):
        torch.manual_seed(0)
        model = CountsCalls()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return unchecked(model, optimizer, devices)

    batch = torch.randn(16, 2), torch.arange(16) % 2
    verdict = verify(make_trainer, [batch] * 2, [1, own(2)], steps=2)
    assert verdict.results[0].fingerprints == verdict.results[1].fingerprints
    assert not verdict.identical
    assert verdict.difference.tensor == "extra/"
