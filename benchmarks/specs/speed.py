"""Training speed: evenstep beside a plain loop, DDP, Accelerate and Lightning Fabric."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark import ALLOCATORS, FOLDER, TRAINING_STEPS, Benchmark, Contender
from evenstep.bench import paired_ratios, scaled, speeds
from evenstep.bench.lineup import ddp, devices, peers, plain
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import NOTHING, Table, cells, median, number, spread, verdict
from evenstep.profiling.accounting import PARTS, whole_percents

NETWORKS = ("lenet", "resnet18")
MEMORY_FORMATS = ("contiguous", "channels_last")
HEAD = ("contender", "batch", "examples/s", "spread", "page faults a step", "kernel", "busy")
RATIO_HEAD = ("ratio", "target", "median", "spread", "verdict")
GAIN_HEAD = ("what it brings", *RATIO_HEAD[1:], "bits")
SCALED_HEAD = ("devices", "batch", "examples/s", "spread", "speed-up", "spread of it", "efficiency")
PART_NAMES = ("busy", "waiting for data", "waiting for others", "summing", "updating")


def lineup() -> list[Contender]:
    """Return all contenders, LeNet's first."""
    lenet, one, two = (
        {"network": network, "examples": examples, **TRAINING_STEPS[network]}
        for network, examples in (("lenet", 256), ("resnet18", 64), ("resnet18", 128))
    )
    last, bf16 = {"memory_format": "channels_last"}, {"precision": "bf16"}
    return [
        *(plain(lenet, threads, one) for threads in (1, 2) for one in MEMORY_FORMATS),
        *peers(lenet, 2),
        *(devices(lenet, count) for count in (1, 2)),
        devices(lenet, 2, max_in_flight=2),
        *(devices(lenet, count, hybridize=True) for count in (1, 2)),
        devices(lenet, 2, shards=2, **last),
        *(devices(lenet, count, **last) for count in (1, 2)),
        *(keeping(plain(lenet, 1, memory_format)) for memory_format in MEMORY_FORMATS),
        *(keeping(ddp(lenet, 2, memory_format)) for memory_format in MEMORY_FORMATS),
        plain(one, 1),
        *peers(two, 2),
        *(devices(one, 1, **last), devices(two, 1, **last), devices(two, 2, **last)),
        devices(two, 2),
        devices(two, 2, max_in_flight=2),
        devices(two, 2, hybridize=True),
        devices(two, 2, batch_norm="sync"),
        *(devices(one, 1, shards=2, **last), devices(two, 2, shards=2, **last)),
        *(devices(one, 1, **bf16, **last), devices(two, 2, **bf16, **last)),
        devices(two, 2, **bf16),
        keeping(ddp(two, 2)),
    ]


def keeping(contender: Contender) -> Contender:
    """Return the contender with a malloc that keeps freed memory."""
    key, label = f"{contender.key}.keeps", f"{contender.label}, malloc keeps"
    return dataclasses.replace(contender, key=key, label=label, environment=ALLOCATORS["keeps"])


def tables(document: Mapping[str, Any], networks: Sequence[str] = NETWORKS) -> dict[str, Table]:
    """Return a table of speeds and one of ratios for each network."""
    found = {}
    for network in networks:
        contenders = [one for one in document["contenders"] if one["network"] == network]
        if rows := [row for one in contenders if (row := speed_row(one, document["runs"]))]:
            found[network] = Table(HEAD, rows)
            found[f"{network}.ratios"] = ratios(document, "ratios", network)
    return found


def ratios(document: Mapping[str, Any], table: str, network: str) -> Table:
    """Return a table of `ratios.csv`: "ratios", or the "gains" of choices or of "batch_norm"."""
    own = [one for one in read_ratios() if (one["table"], one["network"]) == (table, network)]
    rows = [ratio_row(one, document["runs"]) for one in own]
    if table == "ratios":
        return Table(RATIO_HEAD, rows)
    return Table(GAIN_HEAD, [[*row, one["bits"]] for row, one in zip(rows, own, strict=True)])


def read_ratios() -> list[dict[str, str]]:
    """Return the rows of `ratios.csv`: keys of two contenders, and the target of their ratio."""
    with (FOLDER / "ratios.csv").open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def failures(document: Mapping[str, Any]) -> list[str]:
    """Return a line for each contender with runs that failed and were repeated."""
    labels = {one["key"]: f"{one['label']} ({one['network']})" for one in document["contenders"]}
    failed = [run["contender"] for run in document["runs"] if run.get("attempts", 1) > 1]
    return [
        f"{failed.count(key)} of the runs of {labels[key]} failed and had to be repeated."
        for key in sorted(set(failed))
    ]


def speed_row(contender: Mapping[str, Any], runs: Sequence[Run]) -> list[str]:
    """Return the row of a contender; an empty one if it was not measured."""
    own = select(runs, contender=contender["key"])
    if not own:
        return []
    busy = [[one / run["seconds"] for one in run["busy_s"]] for run in own if "busy_s" in run]
    percent = "{:.0%}".format
    return [
        contender["label"],
        str(contender["examples"]),
        *cells([run["examples_per_s"] for run in own]),
        median([run["page_faults"] / contender["steps"] for run in own], "{:,.0f}".format),
        median([run["kernel_s"] / run["seconds"] for run in own], percent),
        ", ".join(median(one, percent) for one in zip(*busy, strict=True)) or NOTHING,
    ]


def ratio_row(ratio: Mapping[str, str], runs: Sequence[Run]) -> list[str]:
    """Return the row of a ratio, taken within each round."""
    ours, theirs = (speeds(runs, f"{ratio['network']}.{ratio[key]}") for key in ("ours", "theirs"))
    values = paired_ratios(ours, theirs)
    at_least = float(ratio["at_least"]) if ratio["at_least"] else None
    target, judged = verdict(values, at_least=at_least, spell="{:.2f}".format)
    return [ratio["text"], target, *cells(values, "{:.2f}".format), judged]


def scaling(document: Mapping[str, Any], *, same_batch: bool) -> Table:
    """Return a row for each number of devices that `evenstep bench scaling` measured."""
    rows = []
    for row in scaled(document, same_batch=same_batch):
        speed = [str(row.devices), str(row.examples), number(row.speed.median), spread(row.speed)]
        gain = [f"{row.speed_up.median:.2f}", spread(row.speed_up), f"{row.efficiency:.0%}"]
        rows.append([*speed, *gain])
    return Table(SCALED_HEAD, rows)


def parts_of_time(document: Mapping[str, Any]) -> Table:
    """Return where the devices' time went, for each number of devices and batch."""
    rows = {
        (row.devices, row.examples): whole_percents(row.shares[part] for part in PARTS)
        for same_batch in (True, False)
        for row in scaled(document, same_batch=same_batch)
    }
    cut = [[*map(str, case), *(f"{one}%" for one in percents)] for case, percents in rows.items()]
    return Table(("devices", "batch", *PART_NAMES), cut)


BENCHMARK = Benchmark(name="training_speed", contenders=lineup(), tables=tables)
