"""The table of the experiment that splits a network in several ways."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evenstep.bench.tables import NOTHING, Table, with_unit
from evenstep.errors import counted
from evenstep.reproduce.plan import Figures, Row
from evenstep.reproduce.splits import costs
from evenstep.reproduce.splits.costs import LINKS, Perceptron, Way, cost, first_width
from evenstep.reproduce.splits.measured import LINES, WAYS

_MB = 1e6
_GPU = 1e14  # operations a second: a round number for a GPU's products in half precision


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
    return [
        _same(measured, job),
        *_speeds(measured, job, last),
        *_where_it_wins(measured, job),
        *_exchanged(measured, job, last),
        *_lines(),
        *_links(measured, job, last),
    ]


def first_widths(*, batches: Sequence[int], speed: float) -> Table:
    """Return the widths from which two devices are faster than one, by arithmetic.

    Args:
        batches: numbers of examples in a step, each with a row for every way of splitting.
        speed: operations a second of one device.
    """
    rows = []
    for batch, way in itertools.product(batches, costs.WAYS):
        widths = [first_width(way, None, link, speed, batch=batch) for link in LINKS]
        rows.append([f"{batch:,}", way, *map(_spelled, widths)])
    return Table(("batch", "split by", *(link.name for link in LINKS)), rows, text_columns=2)


def _rounds(measured: Figures, way: str, devices: int) -> list[Mapping[str, Any]]:
    prefix = f"splits.{way}.{devices}.round"
    return [one for key, one in measured.items() if key.startswith(prefix)]


def _speed(measured: Figures, way: str, devices: int, place: int) -> float | None:
    rounds = _rounds(measured, way, devices)
    return statistics.median(one["examples_per_s"][place] for one in rounds) if rounds else None


def _devices(measured: Figures) -> list[int]:
    return sorted({int(key.split(".")[2]) for key in measured})


def _same(measured: Figures, job: Mapping[str, Any]) -> Row:
    prints = [{one["fingerprints"][place] for one in measured.values()}
              for place in range(len(job["widths"]))]  # fmt: skip
    ways, most = ", ".join(WAYS), max(_devices(measured))
    text = f"fingerprint, split by {ways}, on 1 to {most} devices"
    if all(len(one) == 1 for one in prints):
        (last,) = prints[-1]
        why = f"`{last[:12]}…` How a layer is cut is fixed; who computes it, and where, is not."
        return Row(text=text, here="equal", why=why)
    why = "the promise is broken; please report it, with figures.json."
    return Row(text=text, here="DIFFERENT", why=why)


def _speeds(measured: Figures, job: Mapping[str, Any], place: int) -> Iterator[Row]:
    width = job["widths"][place]
    for way in WAYS:
        for devices in _devices(measured):
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


def _exchanged(measured: Figures, job: Mapping[str, Any], place: int) -> Iterator[Row]:
    """Bytes, waits and memory of a step on two devices."""
    network = _network(job, place)
    by_arithmetic: tuple[tuple[Way, int, str], ...] = (
        ("data", 1, "each device's gradients go to the other, and the sums come back"),
        ("stages", 2 * network.shards, "each shard's activations go on, and their gradients back"),
    )
    for other, waits, why in by_arithmetic:
        nbytes = 2 * cost(other, network, 2).nbytes
        yield Row(text=f"{other}, 2 devices: MB exchanged in a step",
                  here=with_unit(nbytes / _MB, "MB"), why=f"By arithmetic: {why}.")  # fmt: skip
        yield Row(text=f"{other}, 2 devices: synchronisations in a step", here=str(waits))
    for way in WAYS:
        rounds = _rounds(measured, way, 2)
        if not rounds:
            continue
        found = rounds[0]
        if found["nbytes"][place] is not None:
            why = "Counted: activations and their gradients, and a device's slices of the weights."
            yield Row(text=f"{way}, 2 devices: MB exchanged in a step",
                      here=with_unit(found["nbytes"][place] / _MB, "MB"), why=why)  # fmt: skip
            yield Row(text=f"{way}, 2 devices: synchronisations in a step",
                      here=f"{found['meetings'][place]:,.0f}",
                      why="Two for each sliced layer of each shard.")  # fmt: skip
        share = found["held_nbytes"][place] / found["weight_nbytes"][place]
        yield Row(text=f"{way}, 2 devices: share of the weights on the second", here=f"{share:.0%}")


def _lines() -> Iterator[Row]:
    for way in WAYS:
        yield Row(text=f"{way}: lines of a program to change", here=str(LINES[way]))


def _links(measured: Figures, job: Mapping[str, Any], place: int) -> Iterator[Row]:
    """From which width a way pays on other links, by arithmetic."""
    speed_here = _operations_per_s(measured, job, place)
    batch = job["batch_size"]
    for kind, speed in (("a core as here", speed_here), ("a GPU of 100 TFLOP/s", _GPU)):
        for way in costs.WAYS:
            widths = [first_width(way, None, link, speed, batch=batch) for link in LINKS]
            yield Row(
                text=f"{way}, 2 × {kind}: faster than one from width",
                book=NOTHING,
                here=_listed(widths),
                why=f"By arithmetic, for {', '.join(link.name for link in LINKS)}.",
            )
        widths = [first_width("slices", "data", link, speed, batch=batch) for link in LINKS]
        yield Row(
            text=f"slices against data, 2 × {kind}: faster from width",
            here=_listed(widths),
            why="By arithmetic: activations grow with the width, and gradients with its square.",
        )


def _listed(widths: Sequence[int | None]) -> str:
    return ", ".join(map(_spelled, widths))


def _spelled(width: int | None) -> str:
    return "never" if width is None else f"{width:,}"


def _operations_per_s(measured: Figures, job: Mapping[str, Any], place: int) -> float:
    speed = _speed(measured, "data", 1, place)
    network = _network(job, place)
    return network.operations / network.batch * speed if speed else 1e10


def _network(job: Mapping[str, Any], place: int) -> Perceptron:
    return Perceptron(width=job["widths"][place], batch=job["batch_size"], shards=job["shards"])
