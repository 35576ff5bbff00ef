"""The promise with stages, by bits: any model, any cut, against the plain sequential reference."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import evenstep
from crossing_models import Checkpointed, Fanned, Passing, Skips, Taught
from evenstep.engine import InlineLanes
from evenstep.metrics import accuracy
from evenstep.models.gpt import gpt
from grouping import grouped
from layouts import DelayedLanes, own, shared
from reference import assert_same_bits, bits_of, reference_training, whole_state
from trainers import open_trainer, sgd, train
from zoo import CLASSES, ZOO, build, make_batches

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class Blocks(nn.Module):
    """Residual blocks with batch normalisation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            for _ in range(4)
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def normed():
    """Layers whose weights are computed by modules, from parameters of these."""
    torch.manual_seed(0)
    layers = (nn.utils.parametrizations.weight_norm(nn.Linear(36, n)) for n in (36, CLASSES))
    return nn.Sequential(nn.Flatten(), next(layers), nn.Tanh(), next(layers))


MODELS = {
    "normed": normed,
    **{name: functools.partial(build, name) for name in ZOO},
    "skips": Skips,
    "fanned": Fanned,
    "passing": Passing,
    "taught": Taught,
    "blocks": Blocks,
    "recomputed": functools.partial(Checkpointed, reentrant=False),
    "recomputed within": functools.partial(Checkpointed, reentrant=True),
}

CUTS = {
    "normed": [{"1": 0, "3": 1}],
    "convolution": [{"0": 0, "4": 1}, {"0": 0, "2": 1, "4": 2}],
    "batch_norm": [{"0": 0, "1": 1}],
    "dropout": [{"0": 0, "2": 1}],
    "recurrent": [{"lstm": 0, "head": 1}],
    "attention": [{"layer": 0, "layer.linear1": 1}, {"layer": 0, "head": 1}],
    "tied": [{"encode": 0, "decode": 1}],
    "unused": [{"never": 0, "head": 1}],
    "branching": [{"low": 0, "high": 1}],
    "mixed_dtypes": [{"coarse": 0, "fine": 1}],
    "skips": [{"stem": 0, "late": 1}, {"stem": 0, "early": 1, "later": 2}],
    "taught": [{"stem": 0, "late": 1}],
    "blocks": [{"stem": 0, "blocks.2": 1}, {"stem": 0, "blocks.0": 1, "blocks.1.1": 2}],
    "recomputed": [{"one": 0, "two": 1}, {"one": 0, "three": 1}],
    "recomputed within": [{"one": 0, "two": 1}, {"one": 0, "three": 1}],
}
CASES = [(name, stages) for name, cuts in CUTS.items() for stages in cuts]


@functools.cache
def reference_of(name, sizes, shards):
    return reference_training(MODELS[name](), ADAM, make_batches(sizes), shards=shards)


def assert_equals_reference(name, stages, sizes, shards, replicas=1, **options):
    expected, expected_losses = reference_of(name, tuple(sizes), shards)
    devices = shared(replicas * len({*stages.values()}))
    divide = evenstep.Stages(stages), *options.pop("divide", ())
    options = {"devices": devices, **options, "shards": shards, "divide": divide}
    state, losses = train(MODELS[name](), ADAM, make_batches(sizes), **options)
    assert_same_bits(state, expected)
    assert losses == expected_losses


FIRST_CUTS = [(name, cuts[0], 2) for name, cuts in CUTS.items()]


@pytest.mark.parametrize(
    ("name", "stages", "replicas"), [*((*case, 1) for case in CASES), *FIRST_CUTS]
)
@pytest.mark.thinned(2)
def test_every_model_in_every_cut_equals_the_reference(name, stages, replicas):
    assert_equals_reference(name, stages, (33, 16, 19), 7, replicas)


@pytest.mark.parametrize(("name", "stages"), CASES[:6])
@pytest.mark.thinned(2)
def test_with_steps_in_flight(name, stages):
    assert_equals_reference(name, stages, (33, 16, 19, 24), 7, max_in_flight=2)


@pytest.mark.parametrize(("devices", "max_in_flight"), [(shared(4), 2), (own(4), 1)])
def test_with_an_optimizer_that_is_split_by_owners(devices, max_in_flight):
    options = {"devices": devices, "divide": [evenstep.Owners()], "max_in_flight": max_in_flight}
    assert_equals_reference("dropout", {"0": 0, "2": 1}, (33, 16, 19), 7, **options)


@pytest.mark.parametrize(("name", "stages"), CASES[:6])
def test_without_threads(name, stages):
    assert_equals_reference(name, stages, (33, 16), 7, lanes=InlineLanes)


@settings(max_examples=25, deadline=None)
@given(
    case=st.sampled_from([case for case in CASES if case[0] not in ("batch_norm", "blocks")]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shards=st.integers(1, 17),
    replicas=st.integers(1, 3),
    max_in_flight=st.integers(1, 3),
)
def test_any_sizes_and_shards(case, sizes, shards, replicas, max_in_flight):
    assert_equals_reference(*case, sizes, shards, replicas, max_in_flight=max_in_flight)


def tokens(number):
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(65, (17, 12), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


class Rows(nn.Module):
    """A table whose gradients are sparse, by a layer or by a function that is none."""

    def __init__(self, *, by_layer):
        super().__init__()
        torch.manual_seed(0)
        self.by_layer = by_layer
        self.table = nn.Embedding(9, 5, sparse=by_layer)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        tokens = (x.flatten(1) * 2).long().clamp(-4, 4) + 4
        rows = self.table(tokens)
        if not self.by_layer:
            rows = rows.detach() + nn.functional.embedding(tokens, self.table.weight, sparse=True)
        return self.head(rows.mean(1))


BATCHES = make_batches((33, 21, 17))


def steps(trainer):
    for batch in BATCHES:
        trainer.step(*batch)


def assert_as_on_one_device(make_model, stages, use=steps, *, devices=2, sgd=sgd, **options):
    """Compare what `use(trainer)` gives, and the training, on one device and in stages."""
    found = []
    for layout in ({"devices": 1}, {"devices": devices, "divide": evenstep.Stages(stages)}):
        model = make_model()
        options = {"lanes": DelayedLanes, **options, **layout}
        with open_trainer(model, optimizer=sgd(model), **options) as trainer:
            found.append((use(trainer), trainer.fingerprint()))
    assert found[0] == found[1]


def transformer():
    torch.manual_seed(0)
    return gpt(layers=3, heads=2, width=16, context=12)


def next_tokens(model, given, expected):
    scores = model(given).flatten(0, 1)
    total = nn.functional.cross_entropy(scores, expected.flatten(), reduction="sum")
    return total, expected.numel()


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        ("balanced", {}),
        ("balanced", {"precision": "bf16"}),
        ({"tokens": 0, "blocks.1.to_output": 1, "norm": 2}, {"clip_norm": 0.1}),
    ],
)
def test_a_transformer_whose_embedding_is_its_last_layer(stages, options):
    def use(trainer):
        for number in range(3):
            trainer.step(*tokens(number))

    options = {"devices": 3, "objective": next_tokens, **options}
    assert_as_on_one_device(
        transformer, stages, use, sgd=lambda model: ADAM(model.parameters()), **options
    )


def smooth(model, x, y):
    """A loss with the gradient of its output with respect to its input (a gradient penalty)."""
    x = x.clone().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
    loss = nn.functional.cross_entropy(scores, y, reduction="sum")
    return loss + slope.square().sum(), len(y)


def chain():
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 5)
    return nn.Sequential(*layers)


def without_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


SPARSE = {"table": 0, "head": 1}
TRAININGS = {
    "channels last": (Blocks, "balanced", {"memory_format": "channels_last"}),
    "bf16": (Blocks, "balanced", {"precision": "bf16"}),
    "sparse, by a layer": (lambda: Rows(by_layer=True), SPARSE, {"sgd": without_momentum}),
    "sparse, by a function": (lambda: Rows(by_layer=False), SPARSE, {"sgd": without_momentum}),
    "checked in every step": (Skips, {"stem": 0, "late": 1}, {"check": "every 1"}),
    "a backward pass in the objective": (chain, {"1": 0, "3": 1}, {"objective": smooth}),
    "the same in three stages": (
        chain,
        {"1": 0, "3": 1, "4": 2},
        {"objective": smooth, "devices": 3},
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.thinned(2)
def test_a_training_as_on_one_device(name):
    make_model, stages, options = TRAININGS[name]
    assert_as_on_one_device(make_model, stages, **options)


def test_evaluation_and_prediction():
    def use(trainer):
        trainer.step(*BATCHES[0])
        values = trainer.evaluate(BATCHES, {"accuracy": accuracy})
        outputs = trainer.predict([X for X, _ in BATCHES])
        trainer.step(*BATCHES[1])
        return values, bits_of(outputs)

    assert_as_on_one_device(Blocks, "balanced:2", use, devices=4)


def test_gradients_without_an_update():
    def use(trainer):
        trainer.backward(*BATCHES[0])
        trainer.backward(*BATCHES[1], accumulate=True)
        return [bits_of(parameter.grad) for parameter in trainer.model.parameters()]

    assert_as_on_one_device(Skips, "balanced", use)


def test_layers_that_the_user_replaces_between_two_steps():
    def use(trainer):
        trainer.step(*BATCHES[0])
        trainer.model[3] = nn.Tanh()
        trainer.step(*BATCHES[1])

    assert_as_on_one_device(lambda: build("dropout"), {"0": 0, "4": 1}, use)


class Twice(nn.Module):
    """A network whose output without gradients is a target of its output with them."""

    def __init__(self, *, first):
        super().__init__()
        torch.manual_seed(0)
        self.first = first
        self.one, self.two = nn.Linear(36, 12), nn.Linear(12, CLASSES)

    def once(self, x):
        return self.two(self.one(x.flatten(1)).tanh())

    def forward(self, x):
        if self.first:
            with torch.no_grad():
                target = self.once(-x)
            return self.once(x) * target.sigmoid()
        y = self.once(x)
        with torch.no_grad():
            target = self.once(-x)
        return y * target.sigmoid()


@pytest.mark.parametrize("devices", [shared(2), own(2)])
@pytest.mark.parametrize("first", [True, False])
def test_a_pass_without_gradients_may_begin_at_the_first_stage_again(first, devices):
    def use(trainer):
        steps(trainer)
        inputs = [BATCHES[0][0]]
        return bits_of(trainer.predict(inputs, lambda model, x: model(x) + model(-x)))

    make_model = functools.partial(Twice, first=first)
    assert_as_on_one_device(make_model, {"one": 0, "two": 1}, use, devices=devices)


@pytest.mark.parametrize("devices", [shared(2), own(2)])
def test_hooks_of_the_users_on_modules(devices):
    def hook(module):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        module.register_forward_hook(lambda _, args, output: output + args[0].mean(1, keepdim=True))

    def use(trainer):
        trainer.step(*BATCHES[0])
        hook(trainer.model[4])
        trainer.model[4].register_full_backward_hook(lambda _, given, wanted: (given[0] * 0.5,))
        steps(trainer)

    def make_model():
        model = build("dropout")
        hook(model[1])
        return model

    assert_as_on_one_device(make_model, {"0": 0, "4": 1}, use, devices=devices)


def test_a_checkpoint_is_resumed_in_another_arrangement(tmp_path):
    batches = make_batches((33, 16, 19, 24))
    expected, _ = reference_training(Skips(), ADAM, batches, shards=8)
    layouts = [
        {"devices": 2, "divide": evenstep.Stages({"stem": 0, "late": 1})},
        {"devices": 3, "divide": evenstep.Stages("balanced")},
        {"devices": 2},
        {"devices": 4, "divide": evenstep.Stages({"stem": 0, "early": 1}), "max_in_flight": 2},
    ]
    for number, (batch, layout) in enumerate(zip(batches, layouts, strict=True)):
        model = Skips()
        optimizer = ADAM(model.parameters())
        make = (
            evenstep.Trainer if not number else functools.partial(evenstep.Trainer.load, tmp_path)
        )
        with make(model, optimizer, nn.CrossEntropyLoss(), **grouped(**layout)) as trainer:
            trainer.step(*batch)
            trainer.save(tmp_path)
    assert_same_bits(whole_state(model, optimizer), expected)


OWN = [
    ("fanned", {"stem": 0, "one": 1}),
    ("fanned", {"stem": 0, "one": 1, "three": 2}),
    ("passing", {"stem": 0, "late": 1}),
    ("normed", {"1": 0, "3": 1}),
    ("convolution", {"0": 0, "4": 1}),
    ("batch_norm", {"0": 0, "2": 1}),
    ("dropout", {"0": 0, "2": 1}),
    ("attention", {"layer": 0, "head": 1}),
    ("blocks", {"stem": 0, "head": 1}),
    ("recomputed", {"one": 0, "two": 1}),
    ("recomputed", {"one": 0, "three": 1}),
    ("recomputed within", {"one": 0, "two": 1}),
]


@pytest.mark.parametrize(("replicas", "max_in_flight"), [(1, 2), (2, 1)])
@pytest.mark.parametrize(("name", "stages"), OWN)
@pytest.mark.thinned(2)
def test_devices_with_memory_of_their_own(name, stages, replicas, max_in_flight):
    devices = own(len({*stages.values()}) * replicas)
    options = {"devices": devices, "max_in_flight": max_in_flight}
    assert_equals_reference(name, stages, (33, 16, 19), 7, **options)
