"""The section on several processes: the exchange, and training against DDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench.rounds import paired_ratios, summarise
from pages.common import joined, note, origin
from processes import NETWORKS, WAYS
from targets import NETWORK_EXCHANGE_SHARE, PROCESSES_OVER_DDP, SHARED_EXCHANGE_SHARE
from text import NOTHING, number, spread, table, verdict

AT_MOST = {"network": NETWORK_EXCHANGE_SHARE, "memory": SHARED_EXCHANGE_SHARE}


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    megabytes = document["settings"]["exchange"]["elements"] * 4 / 1e6
    exchange = (
        f"A vector as long as ResNet-18's gradients ({megabytes:.1f} MB) is summed over two "
        f"processes here: milliseconds until the slower one is done, the median of each run's "
        f"{document['settings']['exchange']['repetitions']} repetitions."
    )
    training = (
        "Two processes with one CPU device each, against DDP with two processes, as its "
        "documentation says and with evenstep's layout. The same global batch for both."
    )
    ways = ("the sum", "ms", "spread", "over gloo's all_reduce", "target", "verdict")
    speeds = ("network", "over", "evenstep, examples/s", "ratio", "spread", "target", "verdict")
    return joined(
        "## Several processes",
        origin(document),
        exchange,
        table(ways, [_exchange_row(document["runs"], way) for way in WAYS]),
        training,
        table(
            speeds,
            [
                _training_row(document["runs"], network, rival)
                for network in NETWORKS
                for rival in ("ddp", "ddp.channels_last")
            ],
            text_columns=2,
        ),
        note(notes, "processes"),
    )


def _figures(runs: list[dict[str, Any]], variant: str, figure: str) -> dict[int, float]:
    return {run["round"]: run[figure] for run in runs if run["variant"] == variant}


def _exchange_row(runs: list[dict[str, Any]], way: str) -> list[str]:
    own = _figures(runs, f"exchange.{way}", "median_ms")
    if not own:
        return [WAYS[way], *[NOTHING] * 4, "not measured"]
    times = summarise([*own.values()])
    ratios = paired_ratios(own, _figures(runs, "exchange.gloo", "median_ms"))
    ratio = summarise(ratios).median if ratios else None
    at_most = AT_MOST.get(way)
    return [
        WAYS[way],
        number(times.median),
        spread(times),
        NOTHING if ratio is None else number(ratio),
        NOTHING if at_most is None else f"≤ {at_most}",
        NOTHING if at_most is None or ratio is None else verdict(ratio <= at_most),
    ]


def _training_row(runs: list[dict[str, Any]], network: str, rival: str) -> list[str]:
    own = _figures(runs, f"{network}.evenstep", "examples_per_s")
    ratios = paired_ratios(own, _figures(runs, f"{network}.{rival}", "examples_per_s"))
    if not ratios:
        return [network, rival, *[NOTHING] * 4, "not measured"]
    at_least = PROCESSES_OVER_DDP[network] if rival == "ddp" else None
    ratio = summarise(ratios)
    return [
        network,
        rival,
        number(summarise([*own.values()]).median),
        f"{number(ratio.median)}×",
        spread(ratio),
        NOTHING if at_least is None else f"≥ {at_least}×",
        NOTHING if at_least is None else verdict(ratio.median >= at_least),
    ]
