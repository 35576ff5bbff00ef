"""The contract of a step is checked in the first step: what breaks it is refused by name."""

import functools
import logging
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.contract import self_check
from evenstep.errors import ContractError, InputError
from layouts import own
from reference import assert_same_bits
from trainers import sgd, state_of

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 4
CLASSES = 4


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, CLASSES))


def summed(model, X, y):
    return F.cross_entropy(model(X), y, reduction="sum"), len(y)


def train(model, objective=summed, batches=((X, Y), (X, Y)), loss=None, **options):
    options = {"devices": 1, **options}
    with evenstep.Trainer(
        model, sgd(model), loss, objective=None if loss else objective, **options
    ) as trainer:
        for batch in batches:
            trainer.step(*batch)
        return state_of(trainer), trainer.contract


LAYOUTS = {"one device": 1, "two devices": 2, "own memory": own(2)}
everywhere = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS)


class Stateful(nn.Module):
    """Goes on with a state that the shard before has left in an attribute."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(6, CLASSES)
        self.hidden = None

    def forward(self, x):
        output = self.cell(x, None if self.hidden is None else self.hidden[: len(x)])
        self.hidden = output.detach()
        return output


class Momentum(nn.Module):
    """Updates a momentum encoder in forward."""

    def __init__(self, write):
        super().__init__()
        self.query, self.key = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES).requires_grad_(False)
        self.write = write

    def forward(self, x):
        self.write(self.key.weight, self.query.weight)
        return self.query(x) + self.key(x)


def write_in_place(key, query):
    with torch.no_grad():
        key.lerp_(query, 0.1)


def write_past_the_counter(key, query):
    key.data.lerp_(query.data, 0.1)


def write_another_storage(key, query):
    key.data = key.data * 0.9 + query.data * 0.1


# ---- repeat


@everywhere
def test_state_in_an_attribute_is_refused_by_its_name(devices):
    with pytest.raises(ContractError, match=r"changed model\.hidden"):
        train(Stateful(), devices=devices)


@everywhere
@pytest.mark.parametrize(
    "write",
    [write_in_place, write_past_the_counter, write_another_storage],
    ids=lambda f: f.__name__,
)
def test_parameters_written_in_forward_are_refused_by_their_name(write, devices):
    with pytest.raises(ContractError, match=r"key\.weight was written in forward.*after_update"):
        train(Momentum(write), devices=devices)


def test_a_memory_outside_the_model_is_refused():
    seen = []

    def objective(model, X, y):
        output = model(X)
        seen.append(output.detach().mean())
        return F.cross_entropy(output * sum(seen), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=r"two results: its total is .* a memory bank"):
        train(net(), objective)


def test_a_gradient_that_alone_differs_is_named():
    calls = []

    class Stretch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(None)
            return gradient * len(calls)

    def objective(model, X, y):
        return F.cross_entropy(Stretch.apply(model(X)), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=r"the gradient of 0\.weight has other bits"):
        train(net(), objective)


OWN = {"torch": torch.Generator(), "numpy": np.random.default_rng(0), "python": random.Random(0)}
GENERATORS = {
    "numpy.random": (lambda: np.random.rand(), r"numpy\.random is drawn from"),
    "random": (lambda: random.random(), r"Python's random module is drawn from"),
    "a torch.Generator": (
        lambda: torch.rand((), generator=OWN["torch"]),
        r"a torch\.Generator is drawn from",
    ),
    "a numpy Generator": (lambda: OWN["numpy"].random(), r"a numpy\.random\.Generator is drawn"),
    "a random.Random": (lambda: OWN["python"].random(), r"a random\.Random is drawn from"),
}


@everywhere
@pytest.mark.parametrize(("draw", "line"), GENERATORS.values(), ids=GENERATORS)
def test_a_generator_besides_torchs_is_refused_by_file_and_line(draw, line, devices):
    def objective(model, X, y):
        return F.cross_entropy(model(X) * float(draw()), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=rf"{line}.*test_self_check\.py, line \d+"):
        train(net(), objective, devices=devices)


def test_a_generator_that_the_objective_seeds_itself_is_fine():
    def objective(model, X, y):
        scale = np.random.default_rng(0).random() + random.Random(0).random()
        noise = torch.rand(len(X), 1, generator=torch.Generator().manual_seed(1))
        return F.cross_entropy(model(X * noise) * scale, y, reduction="sum"), len(y)

    train(net(), objective, separable=False)


# ---- what learns


@everywhere
def test_a_second_module_in_the_closure_is_refused_by_its_parameters(devices):
    head = nn.Linear(CLASSES, CLASSES)

    def objective(model, X, y):
        return F.cross_entropy(head(model(X)), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=r"the parameter weight of a Linear outside the model"):
        train(net(), objective, devices=devices)
    assert head.weight.grad is None


def test_a_loss_with_parameters_behind_a_lambda_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, y):
            return self.scale * F.cross_entropy(output, y)

    scaled = Scaled()
    with pytest.raises(ContractError, match=r"the parameter scale of a Scaled outside the model"):
        train(net(), loss=lambda output, y: scaled(output, y))


def test_a_tensor_that_requires_a_gradient_is_refused_by_its_shape():
    offset = torch.zeros(CLASSES, requires_grad=True)
    with pytest.raises(ContractError, match=r"a tensor of shape \(4,\)"):
        train(net(), lambda m, X, y: (F.cross_entropy(m(X) + offset, y, reduction="sum"), len(y)))


def test_a_frozen_teacher_and_a_penalty_on_the_inputs_gradient_are_fine():
    teacher = nn.Linear(6, CLASSES)

    def objective(model, X, y):
        with torch.no_grad():
            target = teacher(X)
        X = X.clone().requires_grad_()
        output = model(X)
        (slope,) = torch.autograd.grad(output.sum(), X, create_graph=True)
        return (output - target).square().sum() + slope.square().sum(), len(y)

    _, report = train(net(), objective)
    assert report.unjudged == ""


# ---- separability


def contrast(model, X, y):
    z = F.normalize(model(X))
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(X)), reduction="sum"), len(X)


def of_tokens(model, X, y):
    """Weighs every example like the others, though some have fewer tokens."""
    tokens = y[:, None].expand(-1, 3).clone()
    tokens[::3, 1:] = -100
    logits = model(X)[:, :, None].expand(-1, -1, 3)
    return F.cross_entropy(logits, tokens) * len(y), len(y)


NOT_SEPARABLE = {
    "contrastive": contrast,
    "mean and one": lambda m, X, y: (F.cross_entropy(m(X), y), 1),
    "token weights lost": of_tokens,
    "statistics of the batch": lambda m, X, y: ((m(X) - m(X).mean(0)).square().sum(), len(y)),
    "class weights forgotten": lambda m, X, y: (
        F.cross_entropy(m(X), y, weight=torch.tensor([1.0, 2.0, 3.0, 9.0])) * len(y),
        len(y),
    ),
}


@pytest.mark.parametrize("objective", NOT_SEPARABLE.values(), ids=NOT_SEPARABLE)
def test_an_objective_that_does_not_add_up_is_refused(objective):
    labels = torch.arange(32) % 3  # other class weights in every shard
    with pytest.raises(ContractError, match="does not add up over the shards: 8 examples"):
        train(nn.Linear(6, CLASSES), objective, [(X, labels)])


def test_a_mean_with_class_weights_in_a_lambda_is_refused():
    loss = functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 3.0, 9.0]))
    train(nn.Linear(6, CLASSES), loss=loss)  # evenstep knows what this divides by
    with pytest.raises(ContractError, match="class weights"):
        train(
            nn.Linear(6, CLASSES), loss=lambda o, y: loss(o, y), batches=[(X, torch.arange(32) % 3)]
        )


def test_data_along_another_dimension_are_refused():
    rnn = nn.LSTM(6, CLASSES)  # (time, batch, features)
    batch = (torch.randn(16, 16, 6), torch.zeros(16))
    with pytest.raises(ContractError, match="batch_dim"):
        train(rnn, lambda m, X, y: (m(X)[0].square().sum(), X.shape[0]), [batch])


def test_one_and_the_same_count_is_explained():
    with pytest.raises(ContractError, match=r"return the sum over the examples and their number"):
        train(net(), NOT_SEPARABLE["mean and one"])


@pytest.mark.parametrize("options", [{"separable": False}, {"shards": 1}], ids=str)
def test_who_means_it_may_train_on_what_does_not_add_up(options):
    state, _ = train(nn.Linear(6, CLASSES), contrast, **options)
    assert all(torch.isfinite(value).all() for value in state.values())


def test_totals_that_cancel_are_fine():
    advantage = torch.randn(32)
    advantage -= advantage.mean()

    def policy_gradient(model, X, y, advantage):
        chosen = model(X).log_softmax(1).gather(1, y[:, None])[:, 0]
        return -(chosen * advantage).sum(), len(y)

    _, report = train(net(), policy_gradient, [(X, Y, advantage)])
    assert report.unjudged == ""


DRAWING = {
    "noise": lambda X: X + torch.randn_like(X) * torch.rand(len(X), 1),
    "dropout": lambda X: F.dropout(X, 0.3),
    "mask": lambda X: X * (torch.rand(len(X), 1) < 0.7) * torch.bernoulli(torch.full((6,), 0.5)),
    "time": lambda X: X * torch.randint(1, 9, (len(X), 1)) + torch.empty(len(X), 1).uniform_(2, 3),
    "choice": lambda X: X[:, torch.multinomial(torch.ones(6), 3)].repeat(1, 2),
    "columns": lambda X: X[:, torch.randperm(6)],
    "share": lambda X: X * torch.distributions.Beta(0.4, 0.4).sample((len(X), 1)),
    "scale": lambda X: X * torch.distributions.Gamma(2.0, 1.0).sample((len(X), 1)),
}


@pytest.mark.parametrize("draw", DRAWING.values(), ids=DRAWING)
def test_random_numbers_for_every_example_are_fine(draw):
    _, report = train(net(), lambda model, X, y: summed(model, draw(X), y))
    assert report.unjudged == ""


@pytest.mark.parametrize(
    "layer",
    [
        nn.Sequential(
            nn.Unflatten(1, (3, 2)), nn.TransformerEncoderLayer(2, 1, 4, batch_first=True),
            nn.Flatten(),
        ),
        nn.RReLU(),
    ],
    ids=["attention", "rrelu"],
)  # fmt: skip
def test_layers_that_draw_in_training_only_are_judged(layer):
    _, report = train(nn.Sequential(layer, net()))
    assert report.unjudged == ""


def normalised():
    """Batch normalisation by the statistics of the shard, in evaluation mode too."""
    return nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False), net())


def test_batch_norm_without_running_statistics_is_fine():
    _, report = train(normalised())
    assert report.unjudged == ""


def test_beside_batch_norm_without_running_statistics_the_rest_must_add_up():
    with pytest.raises(ContractError, match="does not add up"):
        train(normalised(), lambda model, X, y: (F.cross_entropy(model(X), y), len(y)))


def test_examples_mixed_at_random_are_refused():
    def mixed(model, X, y):
        return summed(model, X + X[torch.randperm(len(X))], y)

    with pytest.raises(ContractError, match="does not add up"):
        train(net(), mixed)


def test_narrow_numbers_inside_the_model_may_round():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, CLASSES)).bfloat16()

        def forward(self, x):
            return self.layers(x.bfloat16().reshape(1, -1, 6)).float()[0]

    _, report = train(Narrow(), lambda m, X, y: (m(X).square().sum(), len(y)))
    assert report.unjudged == ""


def test_what_cannot_be_judged_is_said():
    def only_in_training(model, X, y):
        assert model.training, "no loss in evaluation mode"
        return summed(model, X, y)

    assert "no loss in evaluation mode" in train(net(), only_in_training)[1].unjudged

    def counting(model, X, y):
        return summed(model, X * torch.poisson(torch.ones(len(X), 1)), y)

    assert "random numbers by poisson" in train(net(), counting)[1].unjudged


# ---- when, and without an effect


@everywhere
@pytest.mark.parametrize("check", ["first", "every 1", "every 2"])
def test_a_check_has_no_effect_on_the_bits(check, devices):
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))

    batches = [(X, Y)] * 4
    expected, nothing = train(model(), batches=batches, check="off")
    state, report = train(model(), batches=batches, check=check, devices=devices)
    assert nothing is None
    assert report.seconds > 0
    assert_same_bits(state, expected)


def test_a_check_leaves_attributes_and_generators_as_they_were():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x + 0 * torch.rand_like(x))

    counted, plain = Counting(6, CLASSES), Counting(6, CLASSES)
    torch.manual_seed(5)
    train(counted, batches=[(X, Y)])
    drawn = torch.rand(3)
    torch.manual_seed(5)
    train(plain, batches=[(X, Y)], check="off")
    assert counted.calls == plain.calls
    assert torch.equal(drawn, torch.rand(3))


def calls_per_step(trainer_options, act=lambda trainer, step: None, steps=4):
    """Return how often the objective was called in each step."""
    calls, model = [], net()[:1]
    model.append(nn.Linear(8, CLASSES))

    def objective(model, X, y):
        calls[-1] += 1
        return summed(model, X, y)

    with evenstep.Trainer(
        model, sgd(model), objective=objective, devices=1, **trainer_options
    ) as trainer:
        for step in range(steps):
            calls.append(0)
            act(trainer, step)
            trainer.step(X, Y)
    return calls


@pytest.mark.parametrize(
    ("check", "calls"),
    [("first", [13, 8, 8, 8]), ("every 2", [13, 8, 13, 8]), ("off", [8, 8, 8, 8])],
    ids=["first", "every 2", "off"],
)
def test_when_it_checks(check, calls):
    assert calls_per_step({"check": check}) == calls


def test_a_change_of_the_layers_is_checked_again():
    def change(trainer, step):
        if step == 2:
            trainer.model.append(nn.Identity())

    assert calls_per_step({}, change) == [13, 8, 13, 8]


def test_a_first_batch_of_one_shard_leaves_the_comparison_to_a_later_one():
    with pytest.raises(ContractError, match="does not add up"):
        train(nn.Linear(6, CLASSES), contrast, [(X[:1], Y[:1]), (X, Y)])


def test_a_resumed_training_is_checked_again(tmp_path):
    model = net()
    with evenstep.Trainer(model, sgd(model), objective=summed, devices=1) as trainer:
        trainer.step(X, Y)
        trainer.save(tmp_path)
    other = net()
    with (
        evenstep.Trainer.load(tmp_path, other, sgd(other), objective=contrast) as trainer,
        pytest.raises(ContractError, match="does not add up"),
    ):
        trainer.step(X, Y)


def test_a_refused_step_is_not_taken():
    model = nn.Linear(6, CLASSES)
    before = model.weight.detach().clone()
    with evenstep.Trainer(model, sgd(model), objective=contrast, devices=2) as trainer:
        for _ in range(2):  # refused again, if the error is caught
            with pytest.raises(ContractError):
                trainer.step(X, Y)
        assert trainer.steps_done == 0
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


@pytest.mark.parametrize("check", ["", "always", "every", "every 0", "every x", 3, None], ids=str)
def test_another_word_is_refused(check):
    with pytest.raises(InputError, match='give "first", "off" or "every N"'):
        train(net(), check=check)


def test_an_error_of_the_users_code_is_the_steps_own():
    def broken(model, X, y):
        raise ZeroDivisionError("by the user")

    with pytest.raises(ZeroDivisionError, match="by the user") as caught:
        train(net(), broken)
    assert "in shard 0 of step 0 on cpu:0" in caught.value.__notes__


def test_a_check_that_cannot_be_made_is_logged(caplog):
    caplog.set_level(logging.DEBUG, "evenstep")

    def broken(model, X, y):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(net(), broken)
    assert "the contract could not be checked" in caplog.text


# ---- every step


@everywhere
def test_a_parameter_written_in_a_later_step_is_refused(devices):
    class Late(Momentum):
        def forward(self, x):
            if x.sum() > 1e3:
                write_in_place(self.key.weight, self.query.weight)
            return self.query(x) + self.key(x)

    with pytest.raises(ContractError, match=r"key\.weight was written"):
        train(Late(None), batches=[(X, Y), (X + 1e4, Y)], devices=devices)


def test_a_size_in_an_attribute_does_not_disturb():
    model = net()
    model.size = torch.Size([6, 4])
    assert train(model)[1].unjudged == ""


def test_numpy_arrays_in_attributes_do_not_disturb():
    model = net()
    model.table = np.eye(3)
    train(model)


def test_a_shard_may_write_to_its_own_examples():
    def objective(model, X, y):
        X.mul_(2)
        y.zero_()
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(model, optimizer, objective=objective, devices=1) as trainer:
        trainer.step(torch.randn(16, 4), torch.ones(16, dtype=torch.int64))


def compiled_in_place():
    layer = nn.Linear(6, CLASSES)
    layer.compile()
    return nn.Sequential(layer)


COMPILED = {
    "the model": lambda: torch.compile(nn.Linear(6, CLASSES)),
    "the layer 1": lambda: nn.Sequential(nn.ReLU(), torch.compile(nn.Linear(6, CLASSES))),
    "the layer 0": compiled_in_place,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about torch
@pytest.mark.parametrize("name", COMPILED)
def test_layers_that_the_user_has_compiled_are_refused(name):
    with pytest.raises(ContractError, match=rf"{name} was compiled.*Trainer\(compile=True\)"):
        train(COMPILED[name]())


def test_the_run_says_once_that_the_number_of_shards_is_part_of_it(caplog):
    train(nn.Linear(6, CLASSES), contrast, separable=False)
    (line,) = [one.message for one in caplog.records if "separable=False" in one.message]
    assert "8" in line


def test_steps_that_fail_do_not_use_up_the_check():
    is_broken, model = [True], nn.Linear(6, CLASSES)

    def objective(model, X, y):
        if is_broken:
            raise ZeroDivisionError
        return contrast(model, X, y)

    with evenstep.Trainer(model, sgd(model), objective=objective, devices=1) as trainer:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                trainer.step(X, Y)
        is_broken.clear()
        with pytest.raises(ContractError, match="does not add up"):
            trainer.step(X, Y)


def test_a_check_that_is_given_up_is_said(caplog, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no room")

    monkeypatch.setattr(self_check, "check_contract", fail)
    train(net(), batches=[(X, Y)] * 5)
    (line,) = [one.message for one in caplog.records if "could not be checked in" in one.message]
    assert "RuntimeError: no room" in line


@pytest.mark.parametrize("first", [0, 2])
def test_what_shards_keep_in_some_steps_only_is_no_reason_to_check_again(first, monkeypatch):
    """At most once more: when it is seen for the first time, it could be the user's change."""

    class Diary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.sizes = nn.Linear(6, CLASSES), []

        def forward(self, x):
            if step[0] >= first and step[0] % 3 == first:
                self.sizes.append(len(x))
            return self.layer(x)

    step, checked, check = [0], [], self_check.check_contract
    monkeypatch.setattr(
        self_check, "check_contract", lambda *given, **o: checked.append(0) or check(*given, **o)
    )
    model = Diary()
    with evenstep.Trainer(model, sgd(model), nn.CrossEntropyLoss(), devices=2) as trainer:
        for step[0] in range(9):
            trainer.step(X, Y)
    assert 1 <= len(checked) <= (1 if first == 0 else 2)
