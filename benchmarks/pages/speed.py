"""The section on training speed: two tables for each network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.bench.rounds import paired_ratios, summarise
from pages.common import joined, note, origin
from targets import BATCH_NORM, GAINS, RATIOS, Ratio
from text import NOTHING, number, percent, spread, table, verdict

TITLES = {
    "lenet": "LeNet: the same batch of 256 on one device and on two",
    "resnet18": "ResNet-18: 64 examples for each device",
}
_METHOD = """Training alone, on seeded noise that lies ready in memory (no data loading), plain SGD.
Every figure comes from a fresh process; in each round every contender runs once, in an order that
rotates. Tables show the median of the rounds, and the least and the most. A ratio is taken within
each round; its median is what a target is held against. `page faults` and `kernel` (share of the
time spent inside the operating system) are those of the first process: memory that malloc gave back
and asks for again. `busy` is the share of the time in which each device of evenstep had work.
evenstep keeps freed memory for the next step by itself; rows with `malloc keeps` give a peer the
same by environment variables (`benchmarks/allocators.py`), which no documentation asks for."""

Runs = Sequence[Mapping[str, Any]]


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    networks = [
        network
        for network in TITLES
        if any(contender["network"] == network for contender in document["contenders"])
    ]
    parts = [_network(document, network, notes) for network in networks]
    return joined(
        "## Training speed",
        origin(document),
        _METHOD,
        _repeated(document),
        note(notes, "method"),
        *parts,
    )


def gains(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section on what each choice brings."""
    tables = [
        joined(
            f"{TITLES[network].split(':')[0]}:",
            table(
                ("what it brings", "target", "median", "spread", "verdict", "bits"),
                [[*_ratio_row(gain, document["runs"]), gain.bits] for gain in rows],
            ),
        )
        for network, rows in GAINS.items()
    ]
    text = (
        f"Examples a second with a choice over those without it, measured as above, in "
        f"{document['settings']['rounds']} rounds; and what the choice does to the bits."
    )
    return joined("## What brings what", origin(document), text, tables, note(notes, "gains"))


def batch_norm(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section on what batch normalisation over the whole batch costs."""
    rounds = document["settings"]["rounds"]
    row = [*_ratio_row(BATCH_NORM, document["runs"]), BATCH_NORM.bits]
    return joined(
        "## Batch normalisation over the whole batch",
        origin(document),
        f"ResNet-18, 128 examples on two devices: examples a second, in {rounds} rounds.",
        table(("what it brings", "target", "median", "spread", "verdict", "bits"), [row]),
        note(notes, "batch_norm"),
    )


def speed_rows(contenders: Sequence[Mapping[str, Any]], runs: Runs) -> list[list[str]]:
    """Return a row of text for each contender that was measured."""
    rows = []
    for contender in contenders:
        mine = [run for run in runs if run["contender"] == contender["key"]]
        if mine:
            rows.append(_speed_row(contender, mine))
    return rows


def ratio_rows(ratios: Sequence[Ratio], runs: Runs) -> list[list[str]]:
    """Return a row of text for each ratio, with its verdict where it has a target."""
    return [_ratio_row(ratio, runs) for ratio in ratios]


def _network(document: dict[str, Any], network: str, notes: Mapping[str, str]) -> str:
    contenders = [one for one in document["contenders"] if one["network"] == network]
    runs = document["runs"]
    speeds = table(
        ("contender", "batch", "examples/s", "spread", "page faults a step", "kernel", "busy"),
        speed_rows(contenders, runs),
    )
    ratios = table(
        ("ratio", "target", "median", "spread", "verdict"), ratio_rows(RATIOS[network], runs)
    )
    rounds = len({run["round"] for run in runs})
    steps = f"{contenders[0]['steps']} timed steps after {contenders[0]['warmup_steps']} of warm-up"
    return joined(
        f"### {TITLES[network]}",
        f"Rounds: {rounds}; {steps}.",
        speeds,
        ratios,
        note(notes, network),
    )


def _repeated(document: dict[str, Any]) -> list[str]:
    """Return a line for each contender some of whose runs ended with an error."""
    labels = {one["key"]: f"{one['label']} ({one['network']})" for one in document["contenders"]}
    failed = [run["contender"] for run in document["runs"] if run.get("attempts", 1) > 1]
    return [
        f"{failed.count(key)} of the runs of {labels[key]} failed and had to be repeated."
        for key in sorted(set(failed))
    ]


def _speed_row(contender: Mapping[str, Any], runs: Runs) -> list[str]:
    speed = summarise([run["examples_per_s"] for run in runs])
    faults = summarise([run["page_faults"] / contender["steps"] for run in runs])
    kernel = summarise([run["kernel_s"] / run["seconds"] for run in runs])
    return [
        contender["label"],
        str(contender["examples"]),
        number(speed.median),
        spread(speed),
        f"{faults.median:,.0f}",
        percent(kernel.median),
        _busy(runs),
    ]


def _busy(runs: Runs) -> str:
    shares = [[busy / run["seconds"] for busy in run["busy_s"]] for run in runs if "busy_s" in run]
    devices = zip(*shares, strict=True)
    return ", ".join(percent(summarise(device).median) for device in devices) or NOTHING


def _ratio_row(ratio: Ratio, runs: Runs) -> list[str]:
    target = NOTHING if ratio.at_least is None else f"≥ {ratio.at_least:.2f}"
    values = paired_ratios(_speeds(runs, ratio.ours), _speeds(runs, ratio.theirs))
    if not values:
        return [ratio.text, target, NOTHING, NOTHING, "not measured"]
    summary = summarise(values)
    reached = NOTHING if ratio.at_least is None else verdict(summary.median >= ratio.at_least)
    return [
        ratio.text,
        target,
        f"{summary.median:.2f}",
        f"{summary.least:.2f} to {summary.most:.2f}",
        reached,
    ]


def _speeds(runs: Runs, key: str) -> dict[int, float]:
    return {run["round"]: run["examples_per_s"] for run in runs if run["contender"] == key}
