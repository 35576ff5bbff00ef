"""Gradients of large tables: kept as rows in the tree, with the bits of dense ones."""

import copy
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.collectives import table_rows, tree_sum
from evenstep.collectives.table_rows import TableRows, tables_in
from evenstep.engine import InlineLanes
from evenstep.errors import ContractError, WrongSumError
from evenstep.shard import compile_policy
from layouts import mixed, own, shared
from reference import assert_same_bits, bits_of, reference_training, whole_state
from trainers import open_trainer, take_steps

ROWS, WIDTH, CLASSES, IDS = 140_000, 4, 3, 6
assert ROWS * WIDTH * 2 >= table_rows.LEAST_BYTES

LAYOUTS = {
    "1": {"devices": 1},
    "3": {"devices": shared(3)},
    "2 own": {"devices": own(2)},
    "3 mixed": {"devices": mixed(3)},
    "in flight": {"devices": 2, "max_in_flight": 2},
    "owners": {"devices": 2, "divide": evenstep.Owners()},
}


def embedding(**options):
    return nn.Embedding(ROWS, WIDTH, **options)


class Words(nn.Module):
    """Looks words up, and classifies their mean."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = embedding(**options), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1).to(self.head.weight.dtype))


class Twice(Words):
    """Looks rows of one table up in three places."""

    def forward(self, ids):
        first, second, third = (self.table(part) for part in ids.split(IDS // 3, 1))
        return self.head((first * torch.sigmoid(second) - third).mean(1))


class Tied(nn.Module):
    """A language model in small: its table is the weight of the output layer, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = embedding(), nn.Linear(WIDTH, ROWS, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.table(ids).mean(1)))


class Bags(nn.Module):
    """A bag of words, weighted or not."""

    def __init__(self, *, weighted=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(ROWS, WIDTH, **options)
        self.head, self.weighted = nn.Linear(WIDTH, CLASSES), weighted

    def forward(self, ids):
        weights = torch.cos(ids.float()) if self.weighted else None
        return self.head(self.table(ids, per_sample_weights=weights))


class Recomputed(Words):
    """Computes its lookup again in the backward pass, and looks rows up outside of that, too."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids):
        one = torch.ones((), requires_grad=True)
        inside = checkpoint(
            lambda factor, rows: self.table(rows) * factor,
            one,
            ids,
            use_reentrant=self.reentrant,
        )
        return self.head((inside * torch.sigmoid(self.table(ids.flip(1)))).mean(1))


class InPlaces(Words):
    """Uses its table in a way that depends on the examples of a shard."""

    def forward(self, ids):
        kind = int(ids[0, 0]) % 4
        if kind == 0:
            rows = self.table.weight[ids]
        elif kind == 1:
            rows = self.table(ids) + self.table.weight.mean()
        elif kind == 2:
            rows = F.embedding(ids, self.table.weight, sparse=True)
        else:
            rows = self.table(ids)
        return self.head(rows.mean(1))


class Sometimes(Words):
    """Looks nothing up in some shards."""

    def forward(self, ids):
        if int(ids[0, 0]) % 4 < 2:
            return self.head(torch.ones(len(ids), WIDTH))
        return super().forward(ids)


def not_itself():
    model = Words()
    parametrizations.weight_norm(model.table)
    return model


MODELS = {
    "words": Words,
    "padding": lambda: Words(padding_idx=1),
    "padding that no shard has": lambda: Words(padding_idx=ROWS - 1),
    "three lookups": Twice,
    "bfloat16": lambda: Words(dtype=torch.bfloat16),
    "float64": lambda: Words().double(),
    "a bag": lambda: Bags(mode="sum"),
    "a bag's mean": lambda: Bags(padding_idx=2),
    "a bag's largest": lambda: Bags(mode="max"),
    "a weighted bag": lambda: Bags(mode="sum", weighted=True),
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed in a backward pass inside": lambda: Recomputed(reentrant=True),
    "a function of its weight": not_itself,
}
AS_ROWS = {"words", "padding", "padding that no shard has", "three lookups", "bfloat16", "float64"}
AS_ROWS |= {"a bag", "a bag's mean", "a weighted bag", "recomputed"}
AS_ROWS |= {"recomputed in a backward pass inside"}  # one of the two


def batches(sizes=(32, 21, 4), classes=CLASSES):
    """Ids of which some occur in many shards, and several times in one."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in sizes:
        ids = torch.randint(ROWS, (size, IDS), generator=generator)
        often = torch.randint(7, (size, IDS), generator=generator)
        ids = torch.where(torch.rand(size, IDS, generator=generator) < 0.5, often, ids)
        ids[::4, 0] = torch.arange(len(ids[::4])) + 3  # the first id of a shard: each kind in turn
        found.append((ids, torch.randint(classes, (size,), generator=generator)))
    return found


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


@pytest.fixture
def taken(monkeypatch):
    """Return the gradients that were taken as rows."""
    found = []
    put = TableRows.put

    def noted(self, number, gradient):
        found.append(gradient)
        put(self, number, gradient)

    monkeypatch.setattr(TableRows, "put", noted)
    return found


def assert_plain(make, data, make_optimizer=momentum, *, layout=None, reference=None, **options):
    """Compare a training with the plain one, whose gradients are dense, and summed in the tree."""
    expected, losses = reference_training(
        make(), make_optimizer, data, shards=8, **(reference or {})
    )
    model = make()
    optimizer = make_optimizer(model.parameters())
    given = {"shards": 8, "devices": 2, **options, **(layout or {})}
    with open_trainer(model, optimizer=optimizer, **given) as trainer:
        found = [float(loss) for loss in [trainer.step(*batch) for batch in data]]
    assert found == losses
    assert_same_bits(whole_state(model, optimizer), expected)


# ---- bits


@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_use_a_table_has_the_bits_of_the_dense_sum(name, taken):
    assert_plain(MODELS[name], batches())
    assert bool(taken) == (name in AS_ROWS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [InPlaces, Sometimes])
def test_shards_that_use_a_table_each_in_its_own_way(make, layout, taken):
    assert_plain(make, batches((32, 32)), layout=LAYOUTS[layout], separable=False)
    assert taken


def test_batches_of_a_single_shard_are_plain(taken):
    assert_plain(Words, batches((1, 32, 1)))
    assert len(taken) >= 8
    taken.clear()
    assert_plain(Words, batches((1, 1)))
    assert not taken


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["words", "three lookups", "a bag's mean"])
def test_every_layout_has_the_bits_of_the_dense_sum(name, layout):
    assert_plain(MODELS[name], batches((33, 16, 8)), adam, layout=LAYOUTS[layout])


def test_a_table_that_is_the_output_layer_too(taken):
    assert_plain(Tied, batches((16, 12), ROWS))
    assert not taken


def test_gradients_divided_by_frequency(taken):
    make = lambda: Words(scale_grad_by_freq=True)  # noqa: E731
    assert_plain(make, batches(), separable=False)
    assert taken


def zeros(model, ids, y):
    """A loss whose gradients are all +0 or −0, some of them after underflow."""
    signs = torch.where(ids % 2 == 0, 0.0, -0.0)
    tiny = torch.where(ids % 3 == 0, -1e-45, 0.0)
    rows = model.table(ids)
    return (rows * (signs + tiny).unsqueeze(-1)).sum() + model.head.weight.sum() * 0, len(ids)


def test_zeros_keep_their_signs(taken):
    data = batches((32,))
    options = {"objective": zeros, "check": "off"}
    assert_plain(Words, data, reference={"objective": zeros}, **options)
    model = Words()
    with open_trainer(model, **options) as trainer:
        trainer.step(*data[0])
    gradient = model.table.weight.grad
    assert (gradient == 0).all()
    assert taken


def negative_zeros(model, ids, y, *, apart):
    """A loss whose gradient of the table is −0 everywhere in some shards, and rows in others.

    There are `apart` shards of one kind, then as many of the other.
    """
    table, shard = model.table, int(ids[0, 0]) - 3
    used = table.weight * -0.0 if shard // apart % 2 else table(ids)
    return used.sum() + model.head.weight.sum(), len(ids)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("apart", [1, 2])
def test_rows_that_a_shard_did_not_use_add_a_zero(apart, layout, taken):
    reference = {"objective": functools.partial(negative_zeros, apart=apart)}
    options = {**reference, "check": "off"}
    assert_plain(Words, batches((32,)), layout=LAYOUTS[layout], reference=reference, **options)
    assert taken


def test_in_autocast(taken):
    model = lambda: Words()  # noqa: E731
    assert_plain(model, batches(), reference={"autocast": torch.bfloat16}, precision="bf16")
    assert taken


def of_words(model, ids, y):
    return F.cross_entropy(model(ids), y, reduction="sum"), len(y)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="too old to compile shards"
)
def test_compiled_shards_beside_rows(taken, monkeypatch):
    """Steps are compiled, and dense; `backward` with an objective of its own is eager, in rows."""
    monkeypatch.setattr(compile_policy, "_MEASURED_S", 0.0)
    data, found = batches((16, 16, 16)), []
    for layout in ("1", "3 mixed"):
        model = Words()
        optimizer = momentum(model.parameters())
        options = {"optimizer": optimizer, "shards": 8, "compile": True, "check": "off"}
        with open_trainer(model, objective=of_words, **options, **LAYOUTS[layout]) as trainer:
            trainer.step(*data[0])
            assert not trainer.hybridized.why_not
            trainer.step(*data[1])
            assert not taken
            trainer.backward(*data[2], objective=with_half)
            assert len(taken) == 8
            taken.clear()
            gradients = {name: one.grad for name, one in model.named_parameters()}
            assert_same_bits(gradients, plain_gradients(model, *data[2]))
            optimizer.step()
            found.append(whole_state(model, optimizer))
    torch._dynamo.reset()
    assert_same_bits(*found)


def plain_gradients(model, ids, y):
    """Return the sum of eight shards' gradients in the tree, each computed by plain torch."""
    copied, leaves = copy.deepcopy(model), []
    for part, labels in zip(ids.tensor_split(8), y.tensor_split(8), strict=True):
        copied.zero_grad()
        (with_half(copied, part, labels)[0] / len(y)).backward()
        leaves.append([one.grad for one in copied.parameters()])
    summed = tree_sum(leaves, lambda left, right: [*map(torch.add, left, right)])
    return dict(zip(dict(model.named_parameters()), summed, strict=True))


def with_half(model, ids, y):
    return of_words(model, ids, y)[0] * 0.5, len(y)


def penalised(model, ids, y):
    """A penalty on the gradient of the table, with a graph of the gradient, and one without."""
    loss = F.cross_entropy(model(ids), y, reduction="sum")
    weight = model.table.weight
    (slope,) = torch.autograd.grad(loss, [weight], create_graph=True)
    (again,) = torch.autograd.grad(loss, [weight], retain_graph=True)
    assert slope.layout is again.layout is torch.strided
    return loss + 1e-3 * slope.square().sum() + again.sum() * 1e-4, len(y)


def test_a_gradient_of_a_gradient():
    options = {"objective": penalised, "separable": False}
    assert_plain(Words, batches((16, 9)), reference={"objective": penalised}, **options)


def with_a_backward_pass(model, ids, y):
    loss = F.cross_entropy(model(ids), y, reduction="sum")
    (loss * 0.5).backward(retain_graph=True)
    return loss, len(y)


def test_a_backward_pass_of_the_objectives_own():
    objective = with_a_backward_pass
    options = {"objective": objective, "check": "off"}
    assert_plain(Words, batches((16, 9)), reference={"objective": objective}, **options)


def test_a_hook_on_the_parameter_gets_the_mean_gradient():
    seen = []

    def hooked():
        model = Words()
        model.table.weight.register_hook(lambda gradient: gradient * 0.5)
        model.table.weight.register_hook(lambda gradient: seen.append(gradient.layout))
        return model

    expected, _ = reference_training(
        Words(), momentum, batches(), shards=8, before_update=lambda one: halve(one.table.weight)
    )
    model = hooked()
    optimizer = momentum(model.parameters())
    assert_same_bits(
        take_steps(open_trainer(model, optimizer=optimizer, shards=8), batches()), expected
    )
    assert seen == [torch.strided] * 3


def halve(parameter):
    parameter.grad.mul_(0.5)


def test_a_hook_on_a_layer_sees_what_it_always_saw():
    seen = []

    class Reads(Words):
        def __init__(self):
            super().__init__()
            self.start, self.early = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, CLASSES)
            self.early.register_full_backward_hook(self.read)

        def forward(self, ids):
            early = self.early(self.start.expand(len(ids), WIDTH))  # so the table comes before it
            return early + super().forward(ids)  # in the backward pass

        def read(self, *_):
            gradient = self.table.weight.grad
            seen.append(None if gradient is None else gradient.sum().item())

    assert_plain(Reads, batches((16,)), devices=1)
    assert None not in seen[:8]  # those of the plain loop
    assert seen[-8:] == seen[:8]


WATCHED = {
    "the parameter": lambda weight, rows, see: weight.register_hook(see),
    "the sum": lambda weight, rows, see: weight.register_post_accumulate_grad_hook(
        lambda one: see(one.grad)
    ),
    "the lookup": lambda weight, rows, see: rows.grad_fn.register_hook(
        lambda given, _: see(given[0])
    ),
    "the leaf": lambda weight, rows, see: rows.grad_fn.next_functions[0][0].register_prehook(
        lambda given: see(given[0])
    ),
    "the leaf, afterwards": lambda weight, rows, see: rows.grad_fn.next_functions[0][
        0
    ].register_hook(lambda _, got: see(got[0])),
}


@pytest.mark.parametrize("watched", WATCHED)
def test_hooks_in_a_shard_see_the_gradients_of_plain_torch(watched):
    seen = []

    class Watches(Words):
        def forward(self, ids):
            weight = self.table.weight
            rows = self.table(ids)
            if handles:
                handles.pop().remove()  # that of the shard before
            see = lambda one: seen.append(bits_of(one.clone()))  # noqa: E731
            handles.append(WATCHED[watched](weight, rows, see))
            return self.head(rows.mean(1))

    handles = []
    (ids, y), *_ = batches((16,))
    model = Watches()
    for part, labels in zip(ids.tensor_split(8), y.tensor_split(8), strict=True):
        model.zero_grad()
        (F.cross_entropy(model(part), labels, reduction="sum") / len(y)).backward()
    plain = [*seen]
    seen.clear()
    handles.clear()
    with open_trainer(Watches(), shards=8, devices=1, check="off") as trainer:
        trainer.step(ids, y)
    assert len(seen) == len(plain) == 8
    assert seen[::2] == plain[::2]  # right shards may be added to the sum to their left


# ---- what users see


def clip(model):
    assert all(one.grad.layout is torch.strided for one in model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def test_gradients_are_clipped():
    assert_plain(Words, batches(), reference={"before_update": clip}, before_update=clip)


def test_backward_leaves_dense_gradients():
    data, model, other = batches((32,))[0], Words(), Words()
    with open_trainer(model, shards=8) as trainer:
        trainer.backward(*data)
        found = [bits_of(one.grad) for one in model.parameters()]
    with open_trainer(other, shards=8, devices=1) as trainer:
        trainer.step(*data)
    assert found == [bits_of(one.grad) for one in other.parameters()]
    assert model.table.weight.grad.layout is torch.strided


def test_a_table_that_shards_write_to_is_refused():
    with (
        open_trainer(Words(max_norm=0.1), shards=8) as trainer,
        pytest.raises(ContractError, match=r"table\.weight"),
    ):
        trainer.step(*batches((32,))[0])


def test_gradients_that_come_from_elsewhere_are_refused():
    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + 1.0

    class Pushed(Words):
        def forward(self, ids):
            return self.head(Added.apply(self.table(ids)).mean(1))

    with (
        open_trainer(Pushed(), shards=8) as trainer,
        pytest.raises(ContractError, match=r"of Added, .* gives table\.weight a gradient"),
    ):
        trainer.step(*batches((32,))[0])


def test_a_sum_that_loses_rows_is_noticed(monkeypatch):
    add = torch.Tensor.__add__
    monkeypatch.setattr(
        torch.Tensor,
        "__add__",
        lambda one, other: one if getattr(one, "is_sparse", False) else add(one, other),
    )
    with (
        open_trainer(Words(), shards=8, devices=1) as trainer,
        pytest.raises(WrongSumError, match=r"table\.weight"),
    ):
        trainer.step(*batches((32,))[0])


# ---- what it costs


def test_a_batch_makes_one_dense_gradient_of_the_rows_that_it_used(taken, monkeypatch):
    written = []
    write = table_rows.write_rows
    monkeypatch.setattr(
        table_rows, "write_rows", lambda rows, out: written.append(rows) or write(rows, out)
    )
    data, model = batches((32,))[0], Words()
    with open_trainer(model, devices=2, shards=8, check="off") as trainer:
        for step in range(1, 4):
            taken.clear()
            trainer.step(*data)
            shards = [{*ids.flatten().tolist()} for ids in data[0].tensor_split(8)]
            assert sorted(len(one.indices()[0]) for one in taken) == sorted(map(len, shards))
            assert len(written) == step
            assert {*written[-1].indices()[0].tolist()} == set.union(*shards)


def test_a_shard_that_uses_much_of_a_table_has_a_dense_gradient(taken):
    class Everything(Words):
        def forward(self, ids):
            return super().forward(ids) + self.table(torch.arange(ROWS // 2)).mean()

    assert_plain(Everything, batches((16,)), separable=False)
    assert not [one for one in taken if len(one.indices()[0]) > ROWS / table_rows.ROWS_PER_INDEX]


def test_portable_arithmetic_has_dense_gradients(taken):
    states = []
    for devices in (1, 2):
        model = Words()
        optimizer = momentum(model.parameters())
        options = {"optimizer": optimizer, "devices": devices, "arithmetic": "portable"}
        states.append(take_steps(open_trainer(model, shards=8, **options), batches()))
    assert_same_bits(*states)
    assert not taken


PEAK = Path(__file__).parents[1] / "support" / "jobs" / "peak_of_a_table.py"


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are reset by /proc")
@pytest.mark.parametrize("devices", [1, 2])
def test_the_peak_is_that_of_a_plain_loop(devices):
    def peak(number):
        ran = subprocess.run(
            [sys.executable, PEAK, str(number)], capture_output=True, text=True, check=True
        )
        return float(ran.stdout)

    plain = peak(0)
    assert plain > 0.9  # its one dense gradient
    assert peak(devices) <= plain + 0.5


# ---- TableRows


def lookup(width=WIDTH):
    table = nn.Parameter(torch.randn(ROWS, width))
    ids = torch.tensor([[3, 5, 3], [5, 5, 9]])
    return table, (F.embedding(ids, table) * torch.arange(1.0, 4)[:, None]).sum()


def test_rows_are_taken_inside_only():
    table, total = lookup()
    with TableRows(total, tables_in(total, [table])) as rows:
        total.backward(retain_graph=True)
    assert table.grad is None
    taken = rows.found[0]
    assert taken.is_coalesced()
    total.backward()
    assert bits_of(table.grad) == bits_of(taken)
    assert taken.indices().tolist() == [[3, 5, 9]]


def test_a_backward_pass_inside_another_is_left_to_torch():
    table, inner = lookup()

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            inner.backward()
            return gradient * 2

    x = torch.ones((), requires_grad=True)
    total = Inside.apply(x)
    with TableRows(total, {id(table): 0}) as rows:
        total.backward()
    assert not rows.found
    assert table.grad.layout is torch.strided


@pytest.mark.parametrize(
    "use",
    [
        lambda table, ids: F.embedding(ids, table) @ table[:WIDTH],
        lambda table, ids: F.embedding(ids, table, sparse=True),
        lambda table, ids: F.embedding(ids, table * 2),
        lambda table, ids: table.index_select(0, ids.flatten()),
    ],
    ids=["an operand, too", "sparse", "of a function of it", "no lookup of a layer"],
)
def test_what_is_no_table(use):
    table = nn.Parameter(torch.randn(ROWS, WIDTH))
    assert tables_in(use(table, torch.tensor([[1, 2]])).sum(), [table]) == {}


def test_small_parameters_are_no_tables():
    small = nn.Parameter(torch.randn(8, WIDTH))
    assert tables_in(F.embedding(torch.tensor([1]), small).sum(), [small]) == {}


@pytest.mark.parametrize("lanes", [InlineLanes])
def test_nothing_is_left_behind_by_an_error(lanes, taken):
    model, data = Words(), batches((16,))[0]
    calls = []

    def failing(gradient):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("in a backward pass")

    def objective(model, ids, y):
        out = model(ids)
        out.register_hook(failing)
        return F.cross_entropy(out, y, reduction="sum"), len(y)

    options = {"objective": objective, "check": "off", "devices": 1, "lanes": lanes}
    with open_trainer(model, **options) as trainer:
        with pytest.raises(RuntimeError, match="in a backward pass"):
            trainer.step(*data)
        taken.clear()
        table, total = lookup()
        total.backward()
        assert table.grad.layout is torch.strided
        assert not taken
