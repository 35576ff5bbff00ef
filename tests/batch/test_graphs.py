"""Batches of graphs, as PyTorch Geometric makes them, are micro-batches of `evenstep.Shards`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import BatchError
from layouts import own
from reference import assert_same_bits, whole_state
from trainers import open_trainer, sgd

SIZES = [(3, 5), (4,), (2, 6, 3), (5, 5)]  # nodes of each graph, for each micro-batch


class StandIn:
    """Graphs with the protocol of torch_geometric.data.Batch: `apply` works in place."""

    def __init__(self, ptr, **stored):
        self.ptr = ptr
        self.__dict__.update(stored)

    def apply(self, function, *names):
        for name in names or [*vars(self)]:
            if isinstance(getattr(self, name), torch.Tensor):
                setattr(self, name, function(getattr(self, name)))
        return self

    def to(self, device):
        return self.apply(lambda tensor: tensor.to(device))

    @property
    def num_nodes(self):
        return len(self.x)

    @property
    def num_graphs(self):
        return len(self.ptr) - 1


def graphs_of(kind):
    """Return micro-batches of graphs, each a ring."""
    random = torch.Generator().manual_seed(0)
    made = []
    for sizes in SIZES:
        nodes = [torch.randn(size, 4, generator=random) for size in sizes]
        rings = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in sizes]
        targets = torch.arange(len(sizes)) % 3
        if kind == "torch_geometric":
            data = pytest.importorskip("torch_geometric.data")
            parts = zip(nodes, rings, targets, strict=True)
            made.append(data.Batch.from_data_list(
                [data.Data(x=x, edge_index=e, y=y[None], name="ring") for x, e, y in parts]
            ))  # fmt: skip
            continue
        ptr = torch.tensor([0, *sizes]).cumsum(0)
        edges = torch.cat([ring + lo for ring, lo in zip(rings, ptr, strict=False)], 1)
        batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        x = torch.cat(nodes)
        made.append(StandIn(ptr, x=x, edge_index=edges, y=targets, batch=batch, name="ring"))
    return made


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, graphs):
        source, target = graphs.edge_index
        x = self.norm(self.body(graphs.x))
        x = torch.zeros_like(x).index_add(0, target, x[source])
        pooled = x.new_zeros(graphs.num_graphs, 8).index_add(0, graphs.batch, torch.tanh(x))
        return self.head(pooled)


def mean(model, graphs):
    return F.cross_entropy(model(graphs), graphs.y)


def total(model, graphs):
    return F.cross_entropy(model(graphs), graphs.y, reduction="sum"), graphs.num_graphs


def built():
    torch.manual_seed(0)
    model = Net()
    return model, sgd(model)


def opened(objective=mean, **layout):
    model, optimizer = built()
    return open_trainer(model, objective=objective, optimizer=optimizer, **layout)


def trained(kind, objective=mean, **layout):
    with opened(objective, **layout) as trainer:
        for _ in range(3):
            loss = trainer.step(evenstep.Shards(graphs_of(kind)))
    return whole_state(trainer.model, trainer.optimizer), float(loss)


def plain_state(kind, micro_batches):
    """Return what plain steps give, whose micro-batches weigh as many examples as graphs."""
    model, optimizer = built()
    for _ in range(3):
        optimizer.zero_grad()
        examples = sum(one.num_graphs for one in micro_batches)
        norm, opening = model.norm, copy.deepcopy(model.norm.state_dict())
        closing = []
        for one in micro_batches:
            norm.load_state_dict(opening)
            (mean(model, one) * one.num_graphs / examples).backward()
            closing.append((norm.running_mean.clone(), norm.running_var.clone(), one.num_graphs))
        norm.running_mean = sum(one * count for one, _, count in closing) / examples
        norm.running_var = sum(one * count for _, one, count in closing) / examples
        optimizer.step()
    return whole_state(model, optimizer)


KINDS = pytest.mark.parametrize("kind", ["stand-in", "torch_geometric"])
LAYOUTS = [{"devices": 2}, {"devices": own(2)}, {"devices": 2, "max_in_flight": 2}]


@KINDS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("objective", [mean, total])
def test_every_layout_has_the_same_bits(kind, objective, layout):
    state, loss = trained(kind, objective, **layout)
    expected, loss_of_one = trained(kind, objective, devices=1)
    assert_same_bits(state, expected)
    assert loss == loss_of_one


@KINDS
def test_each_graph_is_an_example(kind):
    shards = evenstep.Shards(graphs_of(kind))
    assert shards.examples == [len(sizes) for sizes in SIZES]
    state, expected = trained(kind, devices=2)[0], plain_state(kind, graphs_of(kind))
    for name, value in expected.items():
        if torch.is_tensor(value) and value.is_floating_point():
            torch.testing.assert_close(state[name], value)


@KINDS
def test_one_micro_batch_is_the_plain_step(kind):
    one = graphs_of(kind)[0]
    with opened() as trainer:
        trainer.step(evenstep.Shards([one]))
    plain, plain_optimizer = built()
    mean(plain, one).backward()
    plain_optimizer.step()
    expected = whole_state(plain, plain_optimizer)
    assert_same_bits(whole_state(trainer.model, trainer.optimizer), expected)


@KINDS
def test_the_users_graphs_are_left_alone(kind):
    graphs = graphs_of(kind)
    before = [copy.copy(one) for one in graphs]

    def writes(model, graphs):
        graphs.x = graphs.x * 2
        graphs.y.add_(0)
        return mean(model, graphs)

    with opened(writes) as trainer:
        trainer.step(evenstep.Shards(graphs))
    assert all(one.x is other.x for one, other in zip(graphs, before, strict=True))
    assert all(one.name == other.name for one, other in zip(graphs, before, strict=True))


@KINDS
def test_a_graph_batch_is_not_cut(kind):
    graphs = graphs_of(kind)
    with opened(devices=1) as trainer:
        for _ in range(2):  # also when its class is known
            with pytest.raises(BatchError, match=r"batch\[0\] is a .*evenstep\.Shards"):
                trainer.step(graphs[0])
            trainer.step(evenstep.Shards(graphs))
        with pytest.raises(BatchError, match=r"evenstep\.Shards"):
            trainer.evaluate([graphs[0]], {"loss": total})
        found = trainer.evaluate([evenstep.Shards(graphs)], {"loss": total})
    model = trainer.model.eval()
    sums = [total(model, one) for one in graphs]
    expected = sum(loss.item() for loss, _ in sums) / sum(count for _, count in sums)
    assert found["loss"] == pytest.approx(expected)


# ---- as tensors


def of_tensors(model, x, edge_index, batch, y):
    graphs = StandIn(torch.arange(len(y) + 1), x=x, edge_index=edge_index, batch=batch, y=y)
    return F.cross_entropy(model(graphs), y, reduction="sum"), len(y)


@pytest.mark.parametrize("devices", [1, 2, own(2)], ids=str)
def test_graphs_as_tensors_have_batch_norm_too(devices):
    """Each micro-batch counts as one example, and has many nodes."""
    shards = evenstep.Shards([(g.x, g.edge_index, g.batch, g.y) for g in graphs_of("stand-in")])
    assert shards.examples == [1] * len(SIZES)
    with opened(of_tensors, devices=devices) as trainer:
        for _ in range(3):
            trainer.step(shards)
    graphs = graphs_of("stand-in")
    plain, plain_optimizer = built()
    for _ in range(3):
        plain_optimizer.zero_grad()
        count = sum(len(one.y) for one in graphs)
        for one in graphs:
            (F.cross_entropy(plain.train()(one), one.y, reduction="sum") / count).backward()
        plain_optimizer.step()
    for one, other in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
