"""Draws the picture at the top of docs/benchmarks.md: evenstep's speed over that of its peers.

Rows where evenstep loses are drawn too, in their own colour. `write_docs.py` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evenstep.bench import paired_ratios, speeds, summarise
from evenstep.bench.pictures import BLUE, RED, canvas, to_svg
from evenstep.bench.rounds import by_round
from specs import latency
from specs.speed import read_ratios

NETWORKS = {
    "lenet": ("LeNet", "training_speed"),
    "resnet18": ("ResNet-18", "training_speed"),
    "chargpt": ("nanoGPT", "chargpt"),
    "chargpt-small": ("nanoGPT, small", "text_speed"),
    "bert": ("BERT-Tiny", "text_speed"),
}
"""The networks, and the result files that have them."""

PEERS = ("DDP", "Accelerate", "Lightning Fabric", "Hugging Face's Trainer in two processes")
TICKS = (0.25, 0.5, 1, 2, 4)


def compared(documents: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[float]]]:
    """Yield what is compared, and evenstep's speed over the other's in each round."""
    for one in read_ratios():
        peer = (
            one["text"].removeprefix("two devices over ").removesuffix(" as its documentation says")
        )
        name, file = NETWORKS[one["network"]]
        if peer in PEERS and documents[file]:
            runs, keys = (
                documents[file]["runs"],
                (f"{one['network']}.{one[key]}" for key in ("ours", "theirs")),
            )
            if values := paired_ratios(*(speeds(runs, key) for key in keys)):
                yield f"{name}: {peer.removesuffix(' in two processes')}", values
    if documents["latency"]:
        runs = documents["latency"]["runs"]
        for V in latency.OVER_DDP:
            taken = (latency.step_ms(runs, variant) for variant in ("ddp", f"v{V}"))
            yield f"tiny MLP, two processes, V = {V}: DDP", paired_ratios(*taken)
    if documents["step_overhead"]:
        runs = documents["step_overhead"]["runs"]
        for devices in ("1", "2"):
            taken = (by_round(runs, "median_ms", variant=key) for key in ("plain", devices))
            text = f"a step of one parameter, {devices} device{'s' * (devices > '1')}: plain loop"
            yield text, paired_ratios(*taken)


def draw(documents: Mapping[str, Any]) -> str:
    """Return the picture as SVG."""
    rows = [(label, summarise(values)) for label, values in compared(documents) if values]
    with canvas(size=(8, 0.32 * len(rows) + 1.1)) as (figure, axes):
        axes.axvline(1, color="black", linewidth=1)
        for place, (_, ratio) in enumerate(rows):
            colour = BLUE if ratio.median >= 1 else RED
            axes.plot(
                [ratio.least, ratio.most], [place, place], color=colour, linewidth=3, alpha=0.4
            )
            axes.plot(ratio.median, place, "o", color=colour)
            axes.text(ratio.most * 1.04, place, f"{ratio.median:.2f}", va="center", color=colour)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.invert_yaxis()
        axes.set(
            xscale="log", xlim=(TICKS[0], TICKS[-1]), title="evenstep's speed over that of others"
        )
        axes.set_xticks(TICKS, [f"{tick}×" for tick in TICKS], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("slower  ←  1×  →  faster; bars: least to most")
        return to_svg(figure)
