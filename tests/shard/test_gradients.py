"""Gradients are sent while a backward pass still runs, with the bits of the canonical tree."""

import pytest
import torch
from torch import nn

import evenstep
from evenstep.collectives import tree_plan, tree_sum
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import GradientReduction
from evenstep.errors import ModelError
from evenstep.replicas import Replica
from evenstep.shard.gradients import AccumulatedTwiceError, GradientStream
from evenstep.shard.partial_sum import add_gradients
from layouts import TWO, own
from reference import assert_same_bits


class Kept(GradientReduction):
    """Records which buckets are sent, in order."""

    def __init__(self, model, partials, bucket_bytes=4):
        parameters = list(model.parameters())
        self.flats = FlatSpace(parameters, [*reversed(range(len(parameters)))])
        buckets = self.flats.buckets(bucket_bytes)
        super().__init__(self.flats, partials, len(parameters), buckets)
        self.rows = [self.flats.new() for _ in range(partials)]
        self.sent = []

    def _views(self, partial, bucket):
        return dict(self.flats.views(self.rows[partial]))

    def _send(self, bucket):
        self.sent.append(self.buckets[bucket].numbers)

    def total(self):
        raise NotImplementedError

    def drop(self):
        raise NotImplementedError


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def losses_of(model, shards):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(shards, 7, 6, generator=generator)
    return [lambda x=x: model(x).pow(2).sum() for x in inputs]


def plain_gradients(model, loss):
    return list(torch.autograd.grad(loss(), list(model.parameters())))


def stream_shard(stream, replica, shard, node, loss, *, accumulates):
    with stream.of_shard(replica, shard, node, {}, accumulates=accumulates):
        loss().backward()


def in_turn(stream, plan, replica, losses, shards):
    """Compute shards one after the other, accumulating onto the left sibling where it is ready."""
    for shard in shards:
        onto = shard in plan.sibling and plan.sibling[shard] in plan.lefts
        node = plan.parent[shard] if onto else shard
        stream_shard(stream, replica, shard, node, losses[shard], accumulates=onto)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 8])
def test_the_sums_have_the_bits_of_the_tree(shards):
    model = layers()
    losses = losses_of(model, shards)
    expected = tree_sum([plain_gradients(model, loss) for loss in losses], add_gradients)
    plan, replica = tree_plan(shards, shards), Replica(TWO[0], model)
    sending = Kept(model, partials=1)
    in_turn(GradientStream(plan, sending), plan, replica, losses, range(shards))
    for i, view in sending.flats.views(sending.rows[0]):
        assert_same_bits({"sum": view}, {"sum": expected[i]})
    assert sending.present == [bytes([1] * 6)]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_last_layers_are_sent_while_the_first_are_computed():
    model = layers()
    losses = losses_of(model, 4)
    plan, replica = tree_plan(4, 4), Replica(TWO[0], model)
    sending = Kept(model, partials=1)
    seen = []
    model[0].weight.register_hook(lambda _: seen.append(list(sending.sent)))
    in_turn(GradientStream(plan, sending), plan, replica, losses, range(4))
    assert seen[:3] == [[], [], []]  # nothing is final before the last shard
    assert seen[3][:2] == [(5,), (4,)]  # the last layer's bias and weight
    assert sorted(sending.sent) == [(i,) for i in range(6)]


def test_a_bucket_is_sent_when_every_partial_sum_of_it_is_there():
    model = layers()
    losses = losses_of(model, 8)
    plan, replica = tree_plan(8, 8, range(3, 6)), Replica(TWO[0], model)  # partials [3,4) and [4,6)
    sending = Kept(model, partials=2)
    stream = GradientStream(plan, sending)
    in_turn(stream, plan, replica, losses, [4, 5])
    assert sending.sent == []
    stream_shard(stream, replica, 3, 3, losses[3], accumulates=False)
    assert len(sending.sent) == 6
    expected = plain_gradients(model, losses[3])
    for i, view in sending.flats.views(sending.rows[0]):
        assert_same_bits({"sum": view}, {"sum": expected[i]})


def test_parameters_without_gradients_are_sent_as_absent():
    model = layers()
    model[2].weight.requires_grad_(False)
    plan, replica = tree_plan(2, 2), Replica(TWO[0], model)
    sending = Kept(model, partials=1, bucket_bytes=10**6)  # one bucket, with and without
    losses = [lambda: model[4](torch.ones(2, 4)).sum(), lambda: model(torch.ones(2, 6)).sum()]
    in_turn(GradientStream(plan, sending), plan, replica, losses, range(2))
    assert sending.present == [bytes([1, 1, 0, 1, 1, 1])]
    (untouched,) = [view for i, view in sending.flats.views(sending.rows[0]) if i == 2]
    assert_same_bits({"sum": untouched}, {"sum": torch.full((4, 5), -0.0)})


def test_a_gradient_that_was_not_final_is_noticed():
    model = layers()
    plan, replica = tree_plan(1, 1), Replica(TWO[0], model)
    stream = GradientStream(plan, Kept(model, partials=1))

    def twice():
        model(torch.ones(2, 6)).sum().backward()
        return model(torch.ones(2, 6)).sum()

    with pytest.raises(AccumulatedTwiceError):
        stream_shard(stream, replica, 0, 0, twice, accumulates=False)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    plan, replica = tree_plan(1, 1), Replica(TWO[0], model)
    stream = GradientStream(plan, Kept(model, partials=1))

    def loss():
        return model(torch.tensor([1, 2])).sum()

    with pytest.raises(ModelError, match=r"0\.weight got a sparse gradient"):
        stream_shard(stream, replica, 0, 0, loss, accumulates=False)


def test_with_one_shard_a_sparse_update_is_the_plain_one():
    """A plain update adds the gradients of a repeated row one after the other."""
    indices = torch.randint(7, (24, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(24) % 5

    def parts():
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(7, 12, sparse=True), nn.Linear(12, 5))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    plain, optimizer = parts()
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(indices), labels).backward()
        optimizer.step()
    for devices in (1, own(2)):
        model, optimizer = parts()
        options = {"shards": 1, "devices": devices}
        with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **options) as trainer:
            for _ in range(3):
                trainer.step(indices, labels)
        assert_same_bits(model.state_dict(), plain.state_dict())
