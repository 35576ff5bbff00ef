"""The canonical sum by collectives: what goes where, how many bytes, and the bits, in threads."""

import random

import pytest
import torch

from evenstep.batch import ProcessAssignment
from evenstep.collectives import TreeSum, forest, ranked_sum, sent_elements, tree_sum, wait_all
from evenstep.collectives.ranked import parts_of
from over_threads import Counting, on_each_of


class OverMessages:
    """The two collectives by messages between two processes, which a transport carries."""

    def __init__(self, transport):
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size

    def all_to_all(self, out, given, taken, to_each):
        assert len(out) == sum(taken)
        assert len(given) == sum(to_each)
        return self._exchanged(out.split([*taken]), given.split([*to_each]))

    def all_gather(self, outs, given):
        assert {len(one) for one in outs} == {len(given)}
        return self._exchanged(outs, [given] * self.size)

    def _exchanged(self, outs, given):
        others = [rank for rank in range(self.size) if rank != self.rank]
        transfers = [self._transport.receive(outs[rank], rank) for rank in others]
        transfers += [self._transport.send(given[rank], rank) for rank in others]
        outs[self.rank].copy_(given[self.rank].clone())
        return Several(transfers)


class Several(list):
    def wait(self):
        wait_all(self)


def uneven_runs(shards, processes, rng):
    """Return contiguous runs of any lengths, some of them empty."""
    ends = sorted(rng.randint(0, shards) for _ in range(processes - 1))
    return tuple(map(range, [0, *ends], [*ends, shards]))


def values_of(shards, elements, dtype):
    given = torch.Generator().manual_seed(shards + elements)
    return [torch.randn(elements, generator=given).to(dtype) for _ in range(shards)]


def summed(transport, trees, values):
    """Return the sum of all processes' shards, and the bytes that this process has sent."""
    counting = Counting(transport)
    tree = TreeSum(trees.plans[transport.rank], torch.add)
    for shard in trees.runs[transport.rank]:
        tree.put(shard, values[shard])
    out = torch.full_like(values[0], torch.nan)
    ranked_sum(OverMessages(counting), trees, tree.take_partials(), out)
    return out, counting.sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7, 16])
def test_the_bits_are_those_of_one_place_whatever_the_runs(processes, dtype):
    rng = random.Random(processes)
    for shards in (1, 2, 8, 13, 32):
        elements = rng.choice([1, 5, 48, 257])
        trees = forest(shards, shards, uneven_runs(shards, processes, rng))
        values = values_of(shards, elements, dtype)
        expected = tree_sum(values, torch.add)
        found = on_each_of(processes, lambda one, t=trees, v=values: summed(one, t, v))
        for rank, (out, sent) in enumerate(found):
            assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
            assert sent == sent_elements(trees, elements, rank) * out.element_size()


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("each", [1, 2, 8])
def test_a_process_whose_shards_are_one_node_sends_as_much_as_in_a_ring(processes, each):
    shards, elements = processes * each, 240 * processes
    trees = forest(shards, shards, tuple(range(r * each, (r + 1) * each) for r in range(processes)))
    for rank in range(processes):
        assert len(trees.plans[rank].partials) == 1
        ring = 2 * elements * (processes - 1) // processes
        assert sent_elements(trees, elements, rank) == ring


@pytest.mark.parametrize("processes", [2, 3, 5, 16])
def test_each_further_node_costs_half_of_a_ring(processes):
    rng = random.Random(7)
    elements, most = 240 * processes, 0
    for shards in range(processes, 70):
        trees = forest(shards, shards, uneven_runs(shards, processes, rng))
        for rank in range(processes):
            nodes = len(trees.plans[rank].partials)
            most = max(most, nodes)
            each = elements * (processes - 1) // processes
            assert sent_elements(trees, elements, rank) == (nodes + 1) * each
    assert most > 2  # a run of shards may be more than two nodes


@pytest.mark.parametrize(
    ("processes", "shards", "most"),
    [
        (3, 8, 2),  # [3,6) is [3,4), [4,6)
        (3, 16, 3),  # [6,11) is [6,8), [8,10), [10,11)
        (3, 64, 5),  # [22,43) is [22,24), [24,32), [32,40), [40,42), [42,43)
        (8, 64, 1),
    ],
)
def test_the_nodes_of_even_runs_are_those_that_the_docs_name(processes, shards, most):
    runs = tuple(ProcessAssignment([1.0] * processes).runs(shards, 0))
    assert max(len(plan.partials) for plan in forest(shards, shards, runs).plans) == most


@pytest.mark.parametrize("elements", [0, 1, 5, 48, 257])
@pytest.mark.parametrize("processes", [1, 3, 16])
def test_what_one_process_gives_is_what_the_other_takes(processes, elements):
    rng = random.Random(elements)
    trees = forest(24, 24, uneven_runs(24, processes, rng))
    parts = [parts_of(trees, elements, rank) for rank in range(processes)]
    for giver in range(processes):
        for taker in range(processes):
            assert parts[giver].to_each[taker] == parts[taker].taken[giver]
    lo_hi = parts[0].bounds
    assert [lo for lo, _ in lo_hi] == [0, *(hi for _, hi in lo_hi[:-1])]
    assert lo_hi[-1][1] == elements
    assert parts[0].longest <= -(-elements // processes)


def test_swapped_chunks_give_other_bits():
    trees = forest(4, 4, (range(2), range(2, 4)))
    values = values_of(4, 64, torch.float32)
    expected = tree_sum(values, torch.add)

    class Swapped(OverMessages):
        def all_to_all(self, out, given, taken, to_each):
            return super().all_to_all(out, given.roll(to_each[0]), taken, to_each)

    def swapped(transport):
        tree = TreeSum(trees.plans[transport.rank], torch.add)
        for shard in trees.runs[transport.rank]:
            tree.put(shard, values[shard])
        out = torch.empty_like(values[0])
        ranked_sum(Swapped(transport), trees, tree.take_partials(), out)
        return out

    assert not any(torch.equal(out, expected) for out in on_each_of(2, swapped))
