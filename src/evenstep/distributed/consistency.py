"""Checks that all processes of a job train the same thing and are in the same state."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence

import torch
from safetensors.torch import load, save

from evenstep.collectives import Forest, forest
from evenstep.collectives.canonical import takes_one_round
from evenstep.devices.addresses import bytes_of
from evenstep.devices.facts import Facts
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import NetworkReducer
from evenstep.distributed.process_group import Exchange, Peers
from evenstep.errors import DivergedError, InputError, WrongSumError

_NAMED = 4  # differences in one message
_FEW, _MANY = 100, 140_000
"""Known numbers: of a vector that is sent whole, and of all processes' vectors sent in pieces."""


def differences(peers: Peers, facts: Facts, exchange: Exchange) -> dict[str, list[str]]:
    """Return what differs between the processes, each of which must call this function.

    Facts are values that JSON can hold, by name, by kind.

    Returns:
        The names of facts that differ, with both values and processes, by kind; kinds in which all
        agree are left out. It is the same in every process.
    """
    message = json.dumps(facts).encode()
    reported = [json.loads(other) for other in peers.gather(message, exchange)]
    different: dict[str, list[str]] = {}
    for kind in dict.fromkeys(itertools.chain(*reported)):
        first = reported[0].get(kind, {})
        for rank, all_facts in enumerate(reported):
            other = all_facts.get(kind, {})
            different.setdefault(kind, []).extend(
                f"{name} is {other.get(name)} on rank {rank} ({peers.hosts[rank]}), but "
                f"{first.get(name)} on rank 0 ({peers.hosts[0]})"
                for name in {**first, **other}
                if other.get(name) != first.get(name)
            )
    return {kind: texts for kind, texts in different.items() if texts}


def listed(texts: Sequence[str]) -> str:
    """Return the first of some texts, and the number of the others."""
    more = len(texts) - _NAMED
    return "; ".join(texts[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def agree(peers: Peers, facts: Mapping[str, object], what: str, call: str) -> None:
    """Compare facts over all processes, each of which must call this function.

    `what` says in messages what the facts are about; `call` is the trainer's method that compares
    them.

    Raises:
        InputError: some facts differ; the message names them and the process.
    """
    different = differences(peers, {what: facts}, Exchange(call, f"{what} to compare"))
    if different:
        raise InputError(f"the processes disagree about {what}: {listed(different[what])}")


def refuse_divergence(
    peers: Peers,
    digests: Mapping[str, str],
    settings: Mapping[str, str],
    step: int,
    call: str = "step",
) -> None:
    """Compare the training state over all processes, each of which must call this function.

    Tensors are given by their digests. The state was taken after `step` steps.

    Raises:
        DivergedError: a process's state differs from the most frequent one (of two processes, from
            rank 0's); the message names the process and the first setting or tensor that differs.
    """
    found = [sorted(digests.items()), sorted(settings.items())]
    whole = hashlib.sha256(json.dumps(found).encode()).digest()
    states = peers.gather(whole, _exchange(call, "its state", step))
    if len(set(states)) == 1:
        return
    (usual, _), *_ = collections.Counter(states).most_common(1)
    rank = next(rank for rank, state in enumerate(states) if state != usual)
    message = json.dumps([dict(settings), dict(digests)]).encode()
    named = peers.gather(message, _exchange(call, "the digests of its tensors", step))
    different = _first_difference(json.loads(named[rank]), json.loads(named[states.index(usual)]))
    raise DivergedError(
        f"rank {rank} (on {peers.hosts[rank]}) differs from the other processes after step "
        f"{step}: {different}",
        rank,
    )


def follow_the_first(
    peers: Peers, tensors: Mapping[str, torch.Tensor], step: int, call: str
) -> None:
    """Copy the first process's tensors, which are equal within rounding, into all the others'.

    This keeps processes that round differently from drifting apart. Each must call this function.
    The tensors are of floating point, and have the same names and shapes everywhere.

    Raises:
        DivergedError: a process's tensor is further from the first one's than rounding explains.
    """
    own = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    sent = {} if peers.rank else {name: bytes_of(one).clone() for name, one in own.items()}
    (theirs, *_) = peers.gather(save(sent), _exchange(call, "the state of rank 0", step))
    first = {
        name: data.view(own[name].dtype).reshape(own[name].shape)
        for name, data in load(theirs).items()
    }
    far = next((name for name in sorted(own) if not _is_close(own[name], first[name])), "")
    exchange = _exchange(call, "the comparison with rank 0", step)
    for rank, named in enumerate(peers.gather(far.encode(), exchange)):
        if named:
            raise DivergedError(
                f"rank {rank} (on {peers.hosts[rank]}) differs from rank 0 after step {step}, by "
                f"more than rounding explains: {_of_tensor(named.decode())}",
                rank,
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(first[name])


def _exchange(call: str, what: str, step: int) -> Exchange:
    if call == "step":
        return Exchange(call, f"{what} before the update", step)
    return Exchange(call, what)


def _first_difference(theirs: list[dict[str, str]], usual: list[dict[str, str]]) -> str:
    """Describe the first difference between two states, each given as settings and digests."""
    settings, tensors = (
        [name for name in sorted({**other, **ours}) if other.get(name) != ours.get(name)]
        for other, ours in zip(theirs, usual, strict=True)
    )
    if settings:
        name = settings[0]
        return (
            f"{name} is {theirs[0].get(name)} instead of {usual[0].get(name)}. Every process must "
            f"give its optimizer the same settings, and step its scheduler in the same way"
        )
    return _of_tensor(tensors[0])


def _of_tensor(name: str) -> str:
    return (
        f"the first tensor that differs is {name}. Either the script changes the model in that "
        f"process only, or its machine's memory or processor is faulty: resume from the last "
        f"checkpoint without it"
    )


def _is_close(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether two tensors differ by no more than many roundings of their largest numbers."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    distance = torch.linalg.vector_norm(tensor.to(wide) - first.to(wide))
    limit = torch.finfo(tensor.dtype).eps ** 0.5 * torch.linalg.vector_norm(first.to(wide))
    return bool(distance <= limit)


def refuse_wrong_sums(
    peers: Peers, make_reducer: Callable[[FlatSpace], NetworkReducer], call: str
) -> None:
    """Sum known vectors by the exchange and in one place, and compare the bits.

    A library of another version, or with a fault, may swap processes or lose a part; nobody would
    notice before the results are compared. Each process must call this function.

    Raises:
        WrongSumError: in some process the bits differ; every process raises it.
    """
    trees = forest(peers.size, peers.size, tuple(range(one, one + 1) for one in range(peers.size)))
    many = _MANY // peers.size
    while takes_one_round(peers.size, peers.size, 4 * many):
        many *= 2
    for what, sizes in (("few numbers", [_FEW]), ("many numbers", [many, 3])):
        reducer = make_reducer(FlatSpace([torch.empty(one) for one in sizes], range(len(sizes))))
        try:
            reducer.reserve(trees, 0)
            wrong = _wrong_sum(peers, reducer, trees, sizes, call)
        finally:
            reducer.close()
        exchange = Exchange(call, "the comparison of known sums")
        for rank, told in enumerate(peers.gather(wrong.encode(), exchange)):
            if told:
                raise WrongSumError(
                    f"rank {rank} (on {peers.hosts[rank]}) got a wrong sum of {what} from the "
                    f"exchange between {peers.size} processes: {told.decode()}. Training would be "
                    f"wrong without a sign: use another version of torch, or fewer processes, and "
                    f"report it with the output of `evenstep doctor`"
                )


def _wrong_sum(
    peers: Peers, reducer: NetworkReducer, trees: Forest, sizes: Sequence[int], call: str
) -> str:
    """Return how the exchange's sum differs from the sum in one place; empty if it doesn't."""
    reduction = reducer.begin(trees, len(sizes), 0)
    own = trees.partials_of(peers.rank)
    reduction.write_rest([[_known(number, size) for size in sizes] for number in own])
    peers.gather(b"", Exchange(call, "known numbers to add up"))
    found = dict(reduction.gradients(torch.device("cpu")))
    for i, size in enumerate(sizes):
        terms = [_known(number, size) for number in range(len(trees.owners))]
        right = trees.add_up(terms, torch.add)
        differs = (found[i].view(torch.int32) != right.view(torch.int32)).nonzero()
        if len(differs):
            first = int(differs[0])
            return (
                f"{len(differs)} of {size} numbers, the first at place {first}, where it is "
                f"{found[i][first].item()!r} instead of {right[first].item()!r}"
            )
    return ""


def _known(number: int, size: int) -> torch.Tensor:
    """Return a partial sum that every processor computes alike; no two are equal anywhere."""
    mixed = (torch.arange(size, dtype=torch.float64) * 7919 + number * 104_729) % 1_000_003
    signed = mixed if number % 2 else -mixed
    return (signed / 3).to(torch.float32)
