"""A script that sums gradients between emulated accelerators, without a trainer.

    python tests/support/jobs/exchanged.py OUT MODE SEED [FAULT]

Each process writes what it found to OUT.RANK: for each case whether the bits are right, the bytes
that it has sent, what it has copied between the device and the host, and what it has waited for.
FAULT plants a mistake: "no wait" before the exchange, "reused" memory of a sum that was dropped,
"swapped" chunks, or "any order" of the buckets.
"""

import contextlib
import functools
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import emu
import emu.backend
from evenstep.collectives import TreeSum, forest, tree_sum
from evenstep.devices import Device, accelerator
from evenstep.distributed import Exchange, join, refuse_wrong_sums
from evenstep.distributed.accelerators import reduce
from evenstep.distributed.accelerators.backend import BackendCollectives
from evenstep.distributed.accelerators.opening import open_collectives
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.errors import WrongSumError
from evenstep.shard.partial_sum import add_gradients
from launched import meet

out, mode, seed, *fault = sys.argv[1:]
emu.load(Path(__file__).parents[3] / "build")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = Device("emu", RANK % emu.DEVICES)
HERE = DEVICE.torch_device

MIXED = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.complex64]
PLAIN = [torch.float32]
# Sizes of parameters, their dtypes in turn, shards, bytes of a bucket, who has no gradient.
CASES = {
    "one bucket": ([32, 64], PLAIN, 4 * SIZE, 1 << 20, ()),
    "several buckets": ([700, 3, 40, 1000, 5], PLAIN, 2 * SIZE, 1500, ()),
    "mixed dtypes": ([33, 40, 7, 129, 18], MIXED, SIZE, 256, ()),
    "uneven runs": ([257, 64, 31], PLAIN, 3 * SIZE - 1, 512, ()),
    "no gradient of some": ([50, 60, 70], MIXED, 2 * SIZE, 128, (1,)),
    "fewer shards than processes": ([97, 12], PLAIN, max(1, SIZE - 1), 256, ()),
}


def runs_of(shards):
    """Return uneven runs, of which some are no node of the tree."""
    ends = [0, *(min(shards, (3 * shards * one + one) // (3 * SIZE)) for one in range(1, SIZE))]
    return tuple(range(*pair) for pair in zip(ends, [*ends[1:], shards], strict=True))


def gradients_of(shard, step, sizes, dtypes, absent):
    """Return a shard's gradients on the CPU; None for some parameters, everywhere or here."""
    given = torch.Generator().manual_seed(1000 * step + shard)
    found = []
    for i, size in enumerate(sizes):
        one = torch.randn(size, dtype=torch.float64, generator=given)
        is_absent = i in absent or (absent and (shard + i) % 3 == 0)
        found.append(None if is_absent else one.to(dtypes[i % len(dtypes)]))
    return found


def add(left, right):
    """Return left + right in new memory."""
    return add_gradients([one if one is None else one.clone() for one in left], right)


def expected_of(shards, *case):
    """Return the sum in one place, by a tree that knows no processes."""
    return tree_sum([gradients_of(shard, *case) for shard in range(shards)], add)


def partials_of(trees, *case):
    """Return this process's partial sums, on the CPU."""
    plan = trees.plans[RANK]
    tree = TreeSum(plan, add)
    for shard in trees.runs[RANK]:
        tree.put(shard, gradients_of(shard, *case))
    return tree.take_partials()


def write(reduction, partials):
    """Write all buckets in an order of this process's own; free each gradient, and its memory."""
    there = [[one if one is None else one.to(HERE) for one in partial] for partial in partials]
    torch.accelerator.synchronize(HERE)
    emu.host_waits(), emu.host_copies()
    # As kernels of a backward pass, which have not run yet.
    there = [[one if one is None else one * 1 for one in partial] for partial in there]
    turn = [*range(len(reduction.buckets))]
    for bucket in turn[RANK:] + turn[:RANK]:
        for number, partial in enumerate(there):
            numbers = reduction.buckets[bucket].numbers
            reduction.write(bucket, number, [partial[i] for i in numbers])
            for i in numbers:
                partial[i] = None
    reduction.write_rest([[None] * len(one) for one in there])
    for size in (64, 1024, 8192):  # what was freed is used again
        torch.empty(size, device=HERE).fill_(7)


def summed(peers, reducer, shards, step, sizes, dtypes, absent):
    """Sum one step's gradients; return whether they are right, and what it took."""
    trees = forest(shards, shards, runs_of(shards))
    case = step, sizes, dtypes, absent
    if step == 1:  # an attempt that is dropped, half written
        dropped = reducer.begin(trees, len(sizes), step)
        for number in range(len(trees.partials_of(RANK))):
            ones = [torch.ones(sizes[i], device=HERE) for i in dropped.buckets[0].numbers]
            dropped.write(0, number, [one.to(dtypes[0]) for one in ones])
        dropped.drop()
        del dropped
    reduction = reducer.begin(trees, len(sizes), step)
    emu.backend.MOVED.clear()
    write(reduction, partials_of(trees, *case))
    if step == 1:  # what was dropped may be exchanged later than this one was written
        torch.accelerator.current_stream(HERE.index).synchronize()
        emu.host_waits()
    peers.gather(b"", Exchange("step", "its report", step))
    found = dict(reduction.gradients(HERE))
    waits, copies, moved = emu.host_waits(), emu.host_copies(), dict(emu.backend.MOVED)
    right = True
    for i, one in enumerate(expected_of(shards, *case)):
        if one is not None:
            right &= torch.equal(one.view(torch.uint8), found[i].cpu().view(torch.uint8))
    own = len(trees.partials_of(RANK))
    return {"right": right, "waits": waits, "copies": copies, "moved": moved, "partials": own}


def plant(name):
    """Plant a mistake."""
    if name == "no wait":

        @contextlib.contextmanager
        def queued_on(stream):
            before = torch.accelerator.current_stream(stream.device_index)
            torch.accelerator.set_stream(stream)
            yield
            torch.accelerator.set_stream(before)

        accelerator.queued_on = queued_on
    elif name == "reused":
        accelerator.keep = lambda tensor: None
    elif name == "swapped":
        all_to_all = BackendCollectives.all_to_all

        def swapped(self, arrived, given, taken, to_each):
            return all_to_all(self, arrived, given.roll(to_each[0]), taken, to_each)

        BackendCollectives.all_to_all = swapped
    elif name == "any order":

        def send(self, bucket):
            before, self._exchanged = self._exchanged, bucket
            self._exchange_up_to(bucket + 1)
            self._exchanged = before + 1

        reduce._BackendReduction._send = send


def main():
    emu.configure(mode, seed=int(seed) + RANK)
    emu.backend.register()
    for one in fault:
        plant(one)
    torch.set_num_threads(1)
    accelerator.open_lane(accelerator.streams_on([HERE]))
    meet()
    peers = join(20.0)
    found = {}
    with peers.status_board, contextlib.closing(peers):
        collectives = open_collectives(peers, DEVICE, "the test")
        assert collectives is not None
        with contextlib.closing(collectives):
            make = functools.partial(
                reduce.BackendReducer, peers, bucket_bytes=1 << 12, collectives=collectives
            )
            try:
                refuse_wrong_sums(peers, make, "the test")
            except WrongSumError as error:
                found["refused"] = str(error)
            for name, (sizes, dtypes, shards, nbytes, absent) in CASES.items():
                parameters = [
                    torch.empty(size, dtype=dtypes[i % len(dtypes)]) for i, size in enumerate(sizes)
                ]
                flats = FlatSpace(parameters, [*reversed(range(len(sizes)))])
                reducer = reduce.BackendReducer(peers, flats, nbytes, collectives)
                lengths = [(one.hi - one.lo, one.flat) for one in reducer.buckets]
                itemsizes = [flat.element_size() for flat in flats.new()]
                buckets = [(length, itemsizes[flat]) for length, flat in lengths]
                found[name] = [
                    summed(peers, reducer, shards, step, sizes, dtypes, absent) for step in range(3)
                ]
                for one in found[name]:
                    one["buckets"] = buckets
                reducer.close()
    torch.save(found, f"{out}.{RANK}")


main()
