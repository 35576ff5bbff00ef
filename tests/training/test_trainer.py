"""The trainer as a user meets it: their model as it is, clear errors, nothing left half done."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.batch.seeds import derive_seed
from evenstep.data import Loader
from evenstep.errors import (
    BatchError,
    ModelError,
    NonFiniteLossError,
)
from layouts import shared
from reference import assert_same_bits, bits_of, plain_outputs, reference_training
from trainers import LAYOUTS, open_trainer, state_of, take_steps
from zoo import build, make_batches

# The user's own module and optimizer, used as they are


def test_the_users_own_model_gets_the_mean_gradient():
    X, y = make_batches((16,))[0]
    plain, model = build("convolution").double(), build("convolution").double()
    names = list(model.state_dict())
    nn.functional.cross_entropy(plain(X.double()), y).backward()
    with open_trainer(model) as trainer:
        trainer.step(X.double(), y)
        assert trainer.model is model
    assert list(model.state_dict()) == names
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-15)


def test_cpu_devices_share_the_parameters_memory_and_others_do_not():
    def addresses(devices):
        model = build("convolution")
        trainer = open_trainer(model, devices=devices)
        return [
            [parameter.data_ptr() for parameter in replica.parameters]
            for replica in trainer._replicas.all
        ]

    one, two, three = addresses(shared(3))
    assert one == two == three
    one, two, three = addresses(["cpu:0", "cpu:1:own", "cpu:2"])
    assert one == three
    assert not set(one) & set(two)


def test_steps_and_cursor_are_counted():
    loader = evenstep.data.Loader(torch.utils.data.TensorDataset(*make_batches((20,))[0]), 8)
    with open_trainer(build("convolution")) as trainer:
        for epoch in range(2):
            places = []
            for X, y in trainer.epoch(loader):
                places.append((trainer.cursor.epoch, trainer.cursor.step))
                trainer.step(X, y)
            assert places == [(epoch, step) for step in range(3)]
        assert trainer.cursor == evenstep.data.Cursor(2, 0)
        assert trainer.steps_done == 6


# Evaluation


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_evaluation_counts_every_example_once_and_changes_nothing(devices):
    model = build("batch_norm")
    batches = make_batches((16, 16, 7))
    with open_trainer(model, devices=devices) as trainer:
        trainer.step(*batches[0])
        model[3].eval()
        before = state_of(trainer)
        measured = trainer.evaluate(batches, {"accuracy": evenstep.metrics.accuracy})
        assert_same_bits(state_of(trainer), before)
    assert model.training
    assert not model[3].training
    model.eval()
    right = sum((model(X).argmax(1) == y).sum().item() for X, y in batches)
    assert measured == {"accuracy": right / 39}


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_evaluation_leaves_buffers_alone_that_the_model_writes_even_then(devices):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(36, 5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += len(x)
            return self.head(x.flatten(1))

    with open_trainer(Counting(), devices=devices) as trainer:
        trainer.evaluate(make_batches((16,)), {"accuracy": evenstep.metrics.accuracy})
        assert trainer.model.seen == 0


def test_evaluating_or_predicting_nothing_is_refused():
    with open_trainer(build("convolution")) as trainer:
        with pytest.raises(BatchError, match="at least"):
            trainer.evaluate([], {"accuracy": evenstep.metrics.accuracy})
        with pytest.raises(BatchError, match="at least"):
            trainer.predict([])


def test_evaluation_that_draws_is_the_same_everywhere():
    """Dropout left on for evaluation (Monte Carlo dropout)."""

    class AlwaysDrop(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(36, 5)

        def forward(self, x):
            return self.head(nn.functional.dropout(x.flatten(1), 0.5, training=True))

    def summed(output, _):
        return output.double().sum(), len(output)

    def run(devices):
        with open_trainer(AlwaysDrop(), devices=devices) as trainer:
            return trainer.evaluate(make_batches((16, 9)), {"sum": summed})

    results = [run(devices) for devices in LAYOUTS]
    assert all(result == results[0] for result in results)


def test_each_batch_of_an_evaluation_draws_numbers_of_its_own():
    batches, seed, shards = make_batches((6, 6, 3)), 7, 2

    def draw(model, X, y):
        return torch.rand(len(y))

    with open_trainer(build("convolution"), seed=seed, shards=shards) as trainer:
        found = trainer.predict(batches, draw)
    expected = []
    for number, (_, y) in enumerate(batches):
        for shard, part in enumerate(torch.tensor_split(y, shards)):
            own = derive_seed("evaluation", seed, number, shard)
            expected.append(torch.rand(len(part), generator=torch.Generator().manual_seed(own)))
    assert found.equal(torch.cat(expected))


# Random ops that show up late


def test_a_random_op_that_first_runs_in_a_later_step():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(36, 5)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls += 1
            x = x.flatten(1)
            return self.head(nn.functional.dropout(x, 0.5) if self.calls > 2 else x)

    batches = make_batches((16, 16, 16, 16))

    def fresh():
        torch.manual_seed(0)
        return Late()

    expected, _ = reference_training(
        fresh(), lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), batches,
        shards=8,
    )  # fmt: skip
    for devices in LAYOUTS:
        assert_same_bits(take_steps(open_trainer(fresh(), devices=devices), batches), expected)


# Bad input: one clear line, and nothing is lost


class Bomb(nn.Module):
    """A model with batch statistics that fails, or gives NaN, for examples marked in the batch."""

    def __init__(self, bang):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(36)
        self.head = nn.Linear(36, 5)
        self.bang = bang

    def forward(self, x):
        output = self.head(self.norm(x.flatten(1)))
        return self.bang(output) if (x > 1e6).any() else output


def marked(X, example):
    X = X.clone()
    X[example] = 1e9
    return X


def fail(output):
    raise RuntimeError("bang")


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("bang", "error"),
    [(lambda output: output * torch.nan, NonFiniteLossError), (fail, RuntimeError)],
)
def test_a_failed_step_leaves_the_model_as_it_was(devices, bang, error):
    (X, y), (X2, y2) = make_batches((24, 24))
    with open_trainer(Bomb(bang), devices=devices) as trainer:
        trainer.step(X, y)
        before = state_of(trainer)
        with pytest.raises(error):
            trainer.step(marked(X2, 13), y2)
        assert_same_bits(state_of(trainer), before)
        assert trainer.steps_done == 1
        trainer.step(X2, y2)
    undisturbed = open_trainer(Bomb(bang), devices=1)
    take_steps(undisturbed, [(X, y), (X2, y2)])
    assert trainer.fingerprint() == undisturbed.fingerprint()


def test_nan_says_where():
    X, y = make_batches((24,))[0]
    with (
        open_trainer(Bomb(lambda output: output * torch.nan)) as trainer,
        pytest.raises(NonFiniteLossError, match=r"shard 4 \(examples 12 to 14.*step 0.*nan"),
    ):
        trainer.step(marked(X, 13), y)


def test_a_model_that_cannot_be_copied():
    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()
            self.head = nn.Linear(2, 2)

    open_trainer(Locked(), devices=1)
    with pytest.raises(ModelError, match=r"Locked can't be copied.*deepcopy.*train on one device"):
        open_trainer(Locked(), devices=2)


def test_lazy_parameters_need_a_batch_first():
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"1\.weight has no shape yet"):
        evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss())


# Predictions


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_predictions_are_a_row_for_each_example_in_order_and_change_nothing(devices):
    batches = make_batches((16, 16, 7))
    X, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    shuffled = Loader(TensorDataset(X, y), 16, seed=3, drop_last=True)
    with open_trainer(build("batch_norm"), devices=devices) as trainer:
        trainer.step(*batches[0])
        before = state_of(trainer)
        predicted = trainer.predict(shuffled)
        assert trainer.model.training
        assert_same_bits(state_of(trainer), before)
        assert bits_of(trainer.predict(batches)) == bits_of(predicted)
    with open_trainer(build("batch_norm"), devices=1) as alone:
        alone.step(*batches[0])
        assert bits_of(alone.predict(batches)) == bits_of(predicted)
    torch.testing.assert_close(predicted, plain_outputs(alone.model, X))


def test_what_is_predicted_may_be_a_nesting():
    def forward(model, X, y):
        output = model(X)
        return {"class": output.argmax(1), "all": (output, [y])}

    batches = make_batches((16, 3))
    with open_trainer(build("convolution"), devices=2) as trainer:
        predicted = trainer.predict(batches, forward)
        output, (y,) = predicted["all"]
    assert y.equal(torch.cat([y for _, y in batches]))
    assert predicted["class"].equal(output.argmax(1))
    assert not output.requires_grad


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda model, X, y: model(X).sum(), r"of shape \(\)"),
        (lambda model, X, y: model(X)[1:], r"of shape \(1, 5\)"),
        (lambda model, X, y: (model(X), 3.5), "a float"),
    ],
)
def test_an_output_without_a_row_for_each_example_is_refused(forward, told):
    with open_trainer(build("convolution")) as trainer:
        with pytest.raises(ModelError, match=f"for 2 examples is {told}"):
            trainer.predict(make_batches((16,)), forward)
        assert trainer.model.training
