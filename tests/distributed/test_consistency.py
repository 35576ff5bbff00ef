"""States and facts of processes, compared; processes are played by threads."""

import functools
import re

import pytest
import torch

from evenstep.collectives import canonical, connect
from evenstep.distributed import agree, follow_the_first, refuse_divergence, refuse_wrong_sums
from evenstep.distributed.gradient_reduce import BUCKET_BYTES, NetworkReducer
from evenstep.distributed.shared.reduce import SharedMemoryReducer
from evenstep.errors import DivergedError, InputError, WrongSumError
from over_threads import Counting, on_each, on_each_of, peers_over
from reference import assert_same_bits


def test_a_fact_that_one_process_alone_has_is_named():
    def compare(end):
        facts = {"shards": 8} | ({"buffers": "mean"} if end.rank else {})
        with pytest.raises(InputError, match="buffers is mean on rank 1 .*, but None on rank 0"):
            agree(peers_over(end), facts, "what is trained", "step")

    on_each(connect(2), compare)


def test_of_many_facts_that_differ_some_are_named_and_the_others_counted():
    def compare(end):
        facts = {f"fact {number}": end.rank for number in range(6)}
        with pytest.raises(InputError, match=r"fact 3 is 1 on .*; and 2 more$"):
            agree(peers_over(end), facts, "what is trained", "step")

    on_each(connect(2), compare)


@pytest.mark.parametrize("call", ["step", "save"])
def test_a_setting_that_differs_is_named_before_the_tensors(call):
    def compare(end):
        settings = {"lr of parameter group 0": repr(0.5 if end.rank == 2 else 0.1)}
        digests = {"parameter/a": str(end.rank // 2)}
        with pytest.raises(DivergedError) as caught:
            refuse_divergence(peers_over(end), digests, settings, 4, call)
        return str(caught.value), caught.value.rank

    ((text, rank),) = {*on_each(connect(3), compare)}
    assert rank == 2
    assert text.startswith(
        "rank 2 (on host2) differs from the other processes after step 4: lr of parameter group "
        "0 is 0.5 instead of 0.1. "
    )


TENSORS = {
    "float": torch.tensor([1.0, -0.0, 1e-45, 3e38]),
    "narrow": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16).t(),
    "wide": torch.tensor([1 / 3], dtype=torch.float64),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "zeros": torch.zeros(3),
    "empty": torch.zeros(0, 3),
    "images": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
}


def rounded(tensor):
    return tensor * (1 + torch.finfo(tensor.dtype).eps)


def test_processes_take_the_tensors_of_the_first_one_bit_for_bit():
    def follow(end):
        own = {
            name: rounded(tensor) if end.rank else tensor.clone()
            for name, tensor in TENSORS.items()
        }
        places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in own.items()}
        follow_the_first(peers_over(end), own, 4, "save")
        assert {name: (t.data_ptr(), t.stride()) for name, t in own.items()} == places
        return own

    assert not rounded(TENSORS["wide"]).equal(TENSORS["wide"])
    for own in on_each(connect(3), follow):
        assert_same_bits(own, TENSORS)


@pytest.mark.parametrize("name", sorted({*TENSORS} - {"empty"}))
def test_a_tensor_that_rounding_does_not_explain_is_named_in_all(name):
    def follow(end):
        own = {key: tensor.clone() for key, tensor in TENSORS.items()}
        if end.rank == 1:
            own[name][(0,) * own[name].dim()] += 0.5 * own[name].abs().max() + 0.1
        with pytest.raises(DivergedError) as caught:
            follow_the_first(peers_over(end), own, 4, "save")
        return str(caught.value)

    (text,) = {*on_each(connect(2), follow)}
    assert text.startswith(
        f"rank 1 (on host1) differs from rank 0 after step 4, by more than rounding explains: the "
        f"first tensor that differs is {name}. "
    )


class Faulty:
    """A transport with a fault: ranks are swapped, or a message's end is lost."""

    def __init__(self, transport, fault):
        self._transport, self._fault = transport, fault
        self.rank, self.size = transport.rank, transport.size

    def send(self, tensor, to, tag=0):
        if self._fault == "an end is lost" and tensor.is_floating_point() and self.rank == 1:
            tensor = torch.cat([tensor[:-1], tensor.new_zeros(1)])
        return self._transport.send(tensor, to, tag)

    def receive(self, tensor, source, tag=0):
        if self._fault == "ranks are swapped" and tensor.is_floating_point() and self.rank == 0:
            source = {1: 2, 2: 1}.get(source, source)
        return self._transport.receive(tensor, source, tag)


def tried(fault="", make=None):
    def run(end):
        peers = peers_over(Faulty(end, fault))
        make_reducer = make or (lambda peers, flats: NetworkReducer(peers, flats, 1 << 16))
        try:
            refuse_wrong_sums(peers, lambda flats: make_reducer(peers, flats), "step")
        except WrongSumError as error:
            return str(error)
        return ""

    return on_each_of(4, run)


@pytest.mark.parametrize(
    "make", [None, lambda peers, flats: SharedMemoryReducer(peers, flats, 1 << 16)]
)
def test_exchanges_that_add_up_as_in_one_place_are_used(make):
    assert tried(make=make) == [""] * 4


@pytest.mark.parametrize("fault", ["ranks are swapped", "an end is lost"])
def test_an_exchange_that_is_wrong_is_refused_by_every_process(fault):
    (message,) = {*tried(fault)}
    assert re.match(r"rank \d \(on host\d\) got a wrong sum of \w+ numbers from the ex", message)


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_what_is_sent_whole_and_what_is_sent_in_chunks_is_tried(processes):
    def run(end):
        peers = peers_over(Counting(end))
        make = functools.partial(NetworkReducer, peers, bucket_bytes=BUCKET_BYTES)
        refuse_wrong_sums(peers, make, "step")
        return sorted({tag for tag in peers.transport.tags if tag})

    for tags in on_each_of(processes, run):
        assert tags == [1, 1 | canonical._TOTALS]


@pytest.mark.parametrize("small", [True, False], ids=["whole", "in pieces"])
def test_an_exchange_that_adds_in_the_order_of_ranks_is_refused(monkeypatch, small):
    right = canonical.add_in_order

    def by_rank(trees, terms, out, spare):
        if (len(out) < 1000) is small:
            out.copy_(functools.reduce(torch.add, terms))
        else:
            right(trees, terms, out, spare)

    monkeypatch.setattr(canonical, "add_in_order", by_rank)
    (message,) = {*tried()}
    assert f"a wrong sum of {'few' if small else 'many'} numbers" in message
