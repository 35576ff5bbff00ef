"""How a process finds the others that a launcher has started, and makes sure that they fit."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator

from evenstep.devices.discovery import WITHIN_ROUNDING
from evenstep.devices.facts import KINDS, Facts
from evenstep.distributed import (
    Exchange,
    LauncherWatch,
    differences,
    join,
    listed,
    show_reported_errors_in_one_line,
    was_launched,
)
from evenstep.errors import InputError
from evenstep.options.experiment import Experiment
from evenstep.replicas import Replicas
from evenstep.steps.groups.group import Group
from evenstep.steps.groups.linked import LinkedGroup
from evenstep.steps.reducer import ProcessReducer

OPEN = "the `with` that opens the trainer"

_SEED = (
    "A model that is built without a seed has other weights in each process: call "
    "torch.manual_seed(0) before you build it, or load the same weights everywhere"
)


@contextlib.contextmanager
def joined(
    replicas: Replicas,
    experiment: Experiment,
    timeout_s: float,
    facts: Callable[[], Facts],
    own_speed: Callable[[], float],
    in_flight: int,
    refuse_failed: Callable[[], None],
    *,
    allow_rounding: bool,
    make_reducer: type[ProcessReducer] = ProcessReducer,
) -> Iterator[Group]:
    """Find the other processes, if there are any, and yield the group of all of them.

    Args:
        replicas: the replicas of the model in this process.
        experiment: the choices that the result depends on.
        timeout_s: the most seconds that any wait for another process may take.
        facts: returns what the processes compare.
        own_speed: returns how many shards a second this process computes; 0 while unknown.
        in_flight: how many steps may be submitted and not finished.
        refuse_failed: refuses what accelerators of this process have computed if one has failed.
        allow_rounding: whether the processes may round differently.
        make_reducer: the class that reduces steps over several processes.

    Raises:
        PeerError: the processes are not all there within the time limit.
        InputError: they are about to train different things, or would round differently.
    """
    peers = join(timeout_s) if was_launched() else None
    if peers is None or peers.size == 1:
        yield Group(experiment.batch_dim)
        return
    show_reported_errors_in_one_line()
    with peers.status_board, LauncherWatch(), contextlib.closing(peers):
        exchange = Exchange(OPEN, "what it trains, and how it rounds")
        different = _judged(differences(peers, facts(), exchange), allow_rounding=allow_rounding)
        own = json.dumps([len(replicas.all), replicas.on_cpus, in_flight]).encode()
        named = peers.gather(own, Exchange(OPEN, "its number of devices"))
        counts, on_cpus, flights = zip(*map(json.loads, named), strict=True)
        reducer = make_reducer(
            peers, replicas, counts, own_speed, max(flights), refuse_failed, on_cpus=all(on_cpus)
        )
        with contextlib.closing(reducer):
            reducer.prepare(experiment.shards)
            yield LinkedGroup(reducer, experiment.shards, experiment.batch_dim, different)


def _judged(different: dict[str, list[str]], *, allow_rounding: bool) -> str:
    """Return what makes the processes round differently, in words; empty if nothing does.

    Raises:
        InputError: they would train different things, or round differently without leave.
    """

    def those(verdict: str) -> list[str]:
        kinds = [kind for kind in different if KINDS[kind].between == verdict]
        return [text for kind in kinds for text in different[kind]]

    rounding = ""
    if rounds := those("rounds"):
        different.pop("values", None)  # states are equal within rounding
        rounding = listed([*different.get("instructions", ()), *rounds])
    if rounding and not allow_rounding:
        raise InputError(
            f"the processes would round differently: {rounding}. Use the same processors, "
            f"libraries and settings for all, or give Faults(allow_rounding=True): then "
            f"{WITHIN_ROUNDING}"
        )
    if refused := those("refused"):
        fix = f". {_SEED}" if "values" in different else ""
        raise InputError(f"the processes disagree about what is trained: {listed(refused)}{fix}")
    return rounding
