"""The table of the experiment that splits a network in several ways."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evenstep.bench.tables import Table, with_unit
from evenstep.errors import counted
from evenstep.reproduce.plan import Figures, Row
from evenstep.reproduce.rows import compared
from evenstep.reproduce.splits import costs
from evenstep.reproduce.splits.costs import LINKS, Perceptron, Way, cost, first_width
from evenstep.reproduce.splits.measured import LINES, WAYS

_MB = 1e6
_GPU = 1e14  # operations a second: a round number for a GPU's products in half precision
_COUNTED = "Counted: activations and their gradients, and a device's slices of the weights."
_NAMES = ", ".join(link.name for link in LINKS)


def rows(job: Mapping[str, Any], figures: Figures) -> list[Row]:
    """Return the rows of what was measured, and of the arithmetic for other links.

    Args:
        job: the widths, and how the network is trained.
        figures: what was measured, by key of the part: "splits.WAY.DEVICES.roundN".
    """
    measured = {key: one for key, one in figures.items() if key.startswith("splits.")}
    if not measured:
        return []
    last = len(job["widths"]) - 1
    network = Perceptron(width=job["widths"][last], batch=job["batch_size"], shards=job["shards"])
    return [
        _same(measured),
        *_speeds(measured, job, last),
        *_where_it_wins(measured, job),
        *_exchanged(measured, network, last),
        *(Row(text=f"{way}: lines of a program to change", here=str(LINES[way])) for way in WAYS),
        *_links(network, _speed(measured, "data", 1, last)),
    ]


def first_widths(*, batches: Sequence[int], speed: float) -> Table:
    """Return the widths from which two devices are faster than one, by arithmetic.

    Args:
        batches: numbers of examples in a step, each with a row for every way of splitting.
        speed: operations a second of one device.
    """
    rows = [
        [f"{batch:,}", way, *_widths(way, None, speed, batch)]
        for batch, way in itertools.product(batches, costs.WAYS)
    ]
    return Table(("batch", "split by", *(link.name for link in LINKS)), rows, text_columns=2)


def _widths(way: Way, rival: Way | None, speed: float, batch: int) -> list[str]:
    """Return the first width on each link, as a table spells it."""
    found = (first_width(way, rival, link, speed, batch=batch) for link in LINKS)
    return ["never" if width is None else f"{width:,}" for width in found]


def _rounds(measured: Figures, way: str, devices: int) -> list[Mapping[str, Any]]:
    prefix = f"splits.{way}.{devices}.round"
    return [one for key, one in measured.items() if key.startswith(prefix)]


def _speed(measured: Figures, way: str, devices: int, place: int) -> float | None:
    rounds = _rounds(measured, way, devices)
    return statistics.median(one["examples_per_s"][place] for one in rounds) if rounds else None


def _devices(measured: Figures) -> list[int]:
    return sorted({int(key.split(".")[2]) for key in measured})


def _same(measured: Figures) -> Row:
    """Compare the fingerprints of the last width, or those of a width at which they differ."""
    *others, last = zip(*(one["fingerprints"] for one in measured.values()), strict=True)
    shown = next((prints for prints in others if len(set(prints)) > 1), last)
    text = f"fingerprint, split by {', '.join(WAYS)}, on 1 to {max(_devices(measured))} devices"
    return compared(text, shown, "How a layer is cut is fixed; who computes it, and where, is not.")


def _speeds(measured: Figures, job: Mapping[str, Any], place: int) -> Iterator[Row]:
    width = job["widths"][place]
    for way, devices in itertools.product(WAYS, _devices(measured)):
        speed = _speed(measured, way, devices, place)
        if speed is not None:
            text = f"{way}, {counted(devices, 'device')}, width {width:,}: examples a second"
            yield Row(text=text, here=f"{speed:,.0f}")


def _where_it_wins(measured: Figures, job: Mapping[str, Any]) -> Iterator[Row]:
    """At which of the measured widths two devices are faster than one."""
    for way in WAYS:
        pairs = [
            (width, _speed(measured, way, 2, place), _speed(measured, "data", 1, place))
            for place, width in enumerate(job["widths"])
        ]
        known = [(width, two > one) for width, two, one in pairs if two and one]
        if known:
            text = f"{way}, 2 devices: faster than one device at widths"
            tried = ", ".join(f"{width:,}" for width, _ in known)
            here = ", ".join(f"{width:,}" for width, wins in known if wins) or "none of these"
            yield Row(text=text, here=here, why=f"Widths that were tried: {tried}.")


def _exchanged(measured: Figures, network: Perceptron, place: int) -> Iterator[Row]:
    """Bytes, waits and memory of a step on two devices."""

    def megabytes(way: str, nbytes: float, why: str) -> Row:
        text = f"{way}, 2 devices: MB exchanged in a step"
        return Row(text=text, here=with_unit(nbytes / _MB, "MB"), why=why)

    def waits(way: str, count: float, why: str = "") -> Row:
        text = f"{way}, 2 devices: synchronisations in a step"
        return Row(text=text, here=f"{count:,.0f}", why=why)

    by_arithmetic: tuple[tuple[Way, int, str], ...] = (
        ("data", 1, "each device's gradients go to the other, and the sums come back"),
        ("stages", 2 * network.shards, "each shard's activations go on, and their gradients back"),
    )
    for other, count, why in by_arithmetic:
        yield megabytes(other, 2 * cost(other, network, 2).nbytes, f"By arithmetic: {why}.")
        yield waits(other, count)
    for way in WAYS:
        for found in _rounds(measured, way, 2)[:1]:
            if found["nbytes"][place] is not None:
                yield megabytes(way, found["nbytes"][place], _COUNTED)
                why = "Two for each sliced layer of each shard."
                yield waits(way, found["meetings"][place], why)
            share = found["held_nbytes"][place] / found["weight_nbytes"][place]
            text = f"{way}, 2 devices: share of the weights on the second"
            yield Row(text=text, here=f"{share:.0%}")


def _links(network: Perceptron, examples_per_s: float | None) -> Iterator[Row]:
    """From which width a way pays on other links, by arithmetic."""
    here = network.operations / network.batch * examples_per_s if examples_per_s else 1e10
    for kind, speed in (("a core as here", here), ("a GPU of 100 TFLOP/s", _GPU)):
        for way in costs.WAYS:
            widths = ", ".join(_widths(way, None, speed, network.batch))
            text = f"{way}, 2 × {kind}: faster than one from width"
            yield Row(text=text, here=widths, why=f"By arithmetic, for {_NAMES}.")
        widths = ", ".join(_widths("slices", "data", speed, network.batch))
        text = f"slices against data, 2 × {kind}: faster from width"
        why = "By arithmetic: activations grow with the width, and gradients with its square."
        yield Row(text=text, here=widths, why=why)
