"""The promise with stages, by bits: any model, any cut, against the plain sequential reference."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.engine import InlineLanes
from evenstep.metrics import accuracy
from evenstep.models.gpt import gpt
from grouping import grouped
from layouts import own, shared
from reference import assert_same_bits, bits_of, reference_training, whole_state
from trainers import sgd, train
from zoo import CLASSES, ZOO, build, make_batches

ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class Skips(nn.Module):
    """A tensor that is used before the cut, after it, and by two modules there; dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(36, 12)
        self.early = nn.Linear(12, 12)
        self.late = nn.Linear(12, 12)
        self.later = nn.Linear(12, 12)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        y = self.drop(x + self.early(x))
        z = self.late(y) * self.later(y).sigmoid() + x  # x is not passed to a module
        return self.head(self.drop(z) + y)


class Passing(nn.Module):
    """Passes every module a list that it appends to, and a tensor that it writes to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.late = nn.Linear(36, 12), Writing()
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        found, scale = [x], torch.ones(12)
        x = self.late(x, {"found": found}, scale=scale)
        return self.head((x + sum(found)) * scale)


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x, kept, scale):
        x = self.layer(x)
        kept["found"].append(x.sin())
        scale.mul_(0.5)
        return x


class Gated(nn.Module):
    """Uses its input more than once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        return self.layer(x) * x + x.sigmoid()


class Fanned(nn.Module):
    """A tensor that several modules of both later stages get, which each use it more than once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(36, 12)
        self.one, self.two, self.three, self.four = (Gated() for _ in range(4))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        y = self.one(x) + self.two(x)
        return self.head(self.four(self.three(y)) * self.four(self.three(x)))


class Checkpointed(nn.Module):
    """Layers that are recomputed, with dropout; one region reaches over a cut."""

    def __init__(self, *, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.one, self.two, self.three = nn.Linear(36, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x):
        hidden = self.one(x.flatten(1))
        hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)

    def block(self, x):
        return self.three(self.drop(self.two(x).tanh())).tanh()


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


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("name", "stages"), CASES)
def test_every_model_in_every_cut_equals_the_reference(name, stages, replicas):
    assert_equals_reference(name, stages, (33, 16, 19), 7, replicas)


@pytest.mark.parametrize(("name", "stages"), CASES[:6])
def test_with_steps_in_flight(name, stages):
    assert_equals_reference(name, stages, (33, 16, 19, 24), 7, max_in_flight=2)


@pytest.mark.parametrize("devices", [shared(4), own(4)])
@pytest.mark.parametrize("max_in_flight", [1, 2])
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


def train_gpt(**options):
    torch.manual_seed(0)
    model = gpt(layers=3, heads=2, width=16, context=12)
    optimizer = ADAM(model.parameters())

    def objective(model, given, expected):
        scores = model(given)
        total = nn.functional.cross_entropy(
            scores.flatten(0, 1), expected.flatten(), reduction="sum"
        )
        return total, expected.numel()

    options = {"objective": objective, **options}
    with evenstep.Trainer(model, optimizer, **grouped(**options)) as trainer:
        for number in range(3):
            trainer.step(*tokens(number))
        return trainer.fingerprint()


@pytest.mark.parametrize("stages", ["balanced", {"tokens": 0, "blocks.1.to_output": 1, "norm": 2}])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"clip_norm": 0.1}])
def test_a_transformer_whose_embedding_is_its_last_layer(stages, options):
    expected = train_gpt(devices=1, **options)
    assert train_gpt(devices=3, divide=evenstep.Stages(stages), **options) == expected


@pytest.mark.parametrize("options", [{"memory_format": "channels_last"}, {"precision": "bf16"}])
def test_memory_format_and_precision(options):
    batches = make_batches((33, 21))
    expected = train(Blocks(), ADAM, batches, devices=1, **options)
    found = train(Blocks(), ADAM, batches, devices=2, divide=evenstep.Stages("balanced"), **options)
    assert_same_bits(found[0], expected[0])


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


@pytest.mark.parametrize("by_layer", [False, True])
def test_sparse_gradients(by_layer):
    batches = make_batches((33, 21))
    plain = functools.partial(torch.optim.SGD, lr=0.1)
    expected, _ = train(Rows(by_layer=by_layer), plain, batches, devices=1)
    stages = {"table": 0, "head": 1}
    found, _ = train(
        Rows(by_layer=by_layer), plain, batches, devices=2, divide=evenstep.Stages(stages)
    )
    assert_same_bits(found, expected)


def alone_and_staged(make_model, stages, use, objective=None, devices=2):
    """Return what `use(trainer)` gives on one device, and in stages."""
    found = []
    for layout in ({"devices": 1}, {"devices": devices, "divide": evenstep.Stages(stages)}):
        model = make_model()
        loss = None if objective else nn.CrossEntropyLoss()
        options = {"objective": objective, **layout}
        with evenstep.Trainer(model, sgd(model), loss, **grouped(**options)) as trainer:
            found.append((use(trainer), trainer.fingerprint()))
    return found


def test_evaluation_and_prediction():
    batches = make_batches((33, 21))

    def use(trainer):
        trainer.step(*batches[0])
        values = trainer.evaluate(batches, {"accuracy": accuracy})
        outputs = trainer.predict([X for X, _ in batches])
        trainer.step(*batches[1])
        return values, bits_of(outputs)

    one, other = alone_and_staged(Blocks, "balanced:2", use, devices=4)
    assert one == other


def test_gradients_without_an_update():
    batches = make_batches((33, 21))

    def use(trainer):
        trainer.backward(*batches[0])
        trainer.backward(*batches[1], accumulate=True)
        return [bits_of(parameter.grad) for parameter in trainer.model.parameters()]

    one, other = alone_and_staged(Skips, "balanced", use)
    assert one == other


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
    batches = make_batches((33, 21))

    def use(trainer):
        for batch in batches:
            trainer.step(*batch)
        outputs = trainer.predict([batches[0][0]], lambda model, x: model(x) + model(-x))
        return bits_of(outputs)

    make_model = functools.partial(Twice, first=first)
    one, other = alone_and_staged(make_model, {"one": 0, "two": 1}, use, devices=devices)
    assert one == other


@pytest.mark.parametrize("devices", [shared(2), own(2)])
def test_hooks_of_the_users_on_modules(devices):
    batches = make_batches((33, 21, 17))

    def hook(module):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        module.register_forward_hook(lambda _, args, output: output + args[0].mean(1, keepdim=True))

    def use(trainer):
        trainer.step(*batches[0])
        hook(trainer.model[4])
        trainer.model[4].register_full_backward_hook(lambda _, given, wanted: (given[0] * 0.5,))
        for batch in batches[1:]:
            trainer.step(*batch)

    def make_model():
        model = build("dropout")
        hook(model[1])
        return model

    one, other = alone_and_staged(make_model, {"0": 0, "4": 1}, use, devices=devices)
    assert one == other


def smooth(model, x, y):
    """A loss with the gradient of its output with respect to its input (a gradient penalty)."""
    x = x.clone().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
    loss = nn.functional.cross_entropy(scores, y, reduction="sum")
    return loss + slope.square().sum(), len(y)


@pytest.mark.parametrize("stages", [{"1": 0, "3": 1}, {"1": 0, "3": 1, "4": 2}])
def test_an_objective_with_a_backward_pass_inside(stages):
    batches = make_batches((33, 21))

    def use(trainer):
        for batch in batches:
            trainer.step(*batch)

    def make_model():
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 5)
        return nn.Sequential(*layers)

    one, other = alone_and_staged(make_model, stages, use, smooth, len(stages))
    assert one == other


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


def test_layers_that_the_user_replaces_between_two_steps():
    batches = make_batches((33, 21))
    states = []
    for layout in ({"devices": 1}, {"devices": 2, "divide": evenstep.Stages({"0": 0, "4": 1})}):
        model = build("dropout")
        optimizer = sgd(model)
        with evenstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), **grouped(**layout)
        ) as trainer:
            trainer.step(*batches[0])
            model[3] = nn.Tanh()
            trainer.step(*batches[1])
        states.append(whole_state(model, optimizer))
    assert_same_bits(*states)


def test_the_contract_is_checked_again_on_hooked_replicas():
    batches = make_batches((33, 21, 17))
    expected = train(Skips(), ADAM, batches, devices=1)
    found = train(
        Skips(),
        ADAM,
        batches,
        devices=2,
        divide=evenstep.Stages({"stem": 0, "late": 1}),
        check="every 1",
    )
    assert_same_bits(found[0], expected[0])


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


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("name", "stages"), OWN)
def test_devices_with_memory_of_their_own(name, stages, replicas, max_in_flight):
    devices = own(len({*stages.values()}) * replicas)
    options = {"devices": devices, "max_in_flight": max_in_flight}
    assert_equals_reference(name, stages, (33, 16, 19), 7, **options)
