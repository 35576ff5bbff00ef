"""When two devices pay, and what binds a thousand: simulated, for docs/book.md and docs/plan.md."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.bench.pictures import canvas, to_svg
from evenstep.bench.tables import Table
from evenstep.planning import Arrangement, Machine, Work, parse_network
from evenstep.planning.formulas import best_interval_s, useful_share
from evenstep.planning.prediction import predict, usual_s

RATES = ("10Mbit", "100Mbit", "1Gbit", "10Gbit", "100Gbit")
GRADIENTS_MB = (0.01, 0.1, 1, 10, 100, 1000)
STEPS_S = (0.01, 0.1, 1.0)
LATENCY = "50us"
THOUSAND = 1000
MESSAGE_S = 20e-6
"""The processor's time for a message through gloo: assumed, half of what its small sums take."""

BATCH_S, GRADIENTS_NBYTES = 40.0, 100_000_000
"""Of the training on 1,000 devices: a batch on one device, and its gradients (25M parameters)."""

HOUR_S = 3600.0
SAVE_S, RESTART_S = 30.0, 600.0


def _work(step_s: float, nbytes: float, shards: int = 8, spread: float = 0.0) -> Work:
    """Return a step that takes some time on one device, in shards of which a few take longer."""
    each = step_s / shards
    times = (
        (each,) if not spread else tuple(each * (1 + spread * z) for z in (-1.3, -0.4, 0.4, 1.3))
    )
    return Work(
        name="simulated", examples=64 * shards, shards=shards, shard_s=times,
        gradient_nbytes=int(nbytes),
    )  # fmt: skip


def gains(step_s: float) -> list[list[float]]:
    """Return the speed-up of two machines, by size of the gradients and rate of the network."""
    found = []
    for size in GRADIENTS_MB:
        work = _work(step_s, size * 1e6)
        row = []
        for rate in RATES:
            machine = Machine(network=parse_network(f"{rate},{LATENCY}"))
            alone = usual_s(work, machine, Arrangement())
            row.append(alone / usual_s(work, machine, Arrangement(devices=2)))
        found.append(row)
    return found


def draw_two_devices() -> str:
    """Return a picture of when two machines are faster than one, as SVG."""
    with canvas(len(STEPS_S), size=(11, 3.9)) as (figure, axes):
        for one, step_s in zip(axes, STEPS_S, strict=True):
            found = gains(step_s)
            shown = one.imshow(found, vmin=0, vmax=2, cmap="RdBu", aspect="auto", origin="lower")
            for y, row in enumerate(found):
                for x, gain in enumerate(row):
                    dark = abs(gain - 1) > 0.7
                    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
                    one.text(x, y, f"{gain:.2f}", color="white" if dark else "black", **look)
            one.set_xticks(range(len(RATES)), RATES, rotation=40)
            one.set_yticks(range(len(GRADIENTS_MB)), [f"{size:g} MB" for size in GRADIENTS_MB])
            one.set(title=f"a step of {1e3 * step_s:,.0f} ms on one device", xlabel="network")
        axes[0].set_ylabel("gradients")
        figure.colorbar(shown, ax=axes, label="speed-up of two")
        return to_svg(figure)


@functools.cache
def thousand() -> Table:
    """Return what 1,000 devices bring under several conditions, one of which is changed each."""
    usual = {"shards": 1024, "devices": THOUSAND, "network": "100Gbit,10us", "message_s": 0.0}
    rows = []
    for label, change in (
        ("V = 1,024 on 1,000 devices", {}),
        ("V = 1,000 on 1,000 devices", {"shards": 1000}),
        ("V = 3,000 on 1,000 devices", {"shards": 3000}),
        ("V = 1,024 on 1,024 devices", {"devices": 1024}),
        ("V = 8,192 on 1,024 devices", {"devices": 1024, "shards": 8192}),
        ("the same, on 10 Gbit", {"devices": 1024, "network": "10Gbit,10us"}),
        ("the same, with 20 us for each message", {"devices": 1024, "message_s": MESSAGE_S}),
        ("shards that vary by 10%", {"devices": 1024, "spread": 0.1}),
        ("devices that vary by 10% from step to step", {"devices": 1024, "step_spread": 0.1}),
    ):
        rows.append([label, *_row(**{**usual, **change})])
    heads = ("", "speed-up", "efficiency", "MB sent by each", "partial sums", "what binds")
    return Table(heads, rows)


def _row(
    *,
    shards: int,
    devices: int,
    network: str,
    message_s: float,
    spread: float = 0.0,
    step_spread: float = 0.0,
) -> list[str]:
    link = dataclasses.replace(parse_network(network), message_s=message_s)
    work = _work(BATCH_S, GRADIENTS_NBYTES, shards, spread)
    machine = Machine(network=link, step_spread=step_spread)
    found = predict(work, machine, Arrangement(devices=devices))
    sent = next(text for text in found.reasons if "MB in a step" in text)
    sums = next((text for text in found.reasons if "partial sums" in text), "sends up to 1 ")
    count = sums.partition("up to ")[2].split()[0]
    numbers = [f"{found.speed_up:,.0f}", f"{found.efficiency:.0%}", sent.split()[3], count]
    return [*numbers, found.binds]


@functools.cache
def failures() -> Table:
    """Return how often to save, and what is lost, by devices and their time between failures."""
    rows = []
    for hours in (5_000, 50_000):
        for devices in (1, 100, 1_000, 10_000):
            between_s = hours * HOUR_S / devices
            interval_s = best_interval_s(SAVE_S, between_s)
            useful = useful_share(interval_s, SAVE_S, RESTART_S, between_s)
            each = [f"{between_s / HOUR_S:,.1f} h", f"{interval_s / 60:,.0f} min", f"{useful:.1%}"]
            rows.append([f"{hours:,} h", f"{devices:,}", *each])
    heads = ("a device fails every", "devices", "a failure every", "save every", "training")
    return Table(heads, rows)


def write(folder: Path) -> Sequence[Path]:
    """Write the pictures; return their files."""
    file = folder / "book_two_devices.svg"
    file.write_text(draw_two_devices(), encoding="utf-8")
    return [file]
