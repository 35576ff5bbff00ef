"""The section on memory: peaks beside their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench.rounds import Summary, summarise
from pages.common import joined, note, origin
from text import NOTHING, mebibytes, table, verdict

LABELS = {"resnet18": "ResNet-18", "mlp": "MLP, four layers of 2048 x 2048"}
MALLOCS = {"default": "as evenstep sets it", "gives_back": "gives back at once"}
_TEXT = """Peak resident memory (VmHWM) of a fresh process that trains for a few steps. The bound on
k devices is one device's peak + (k - 1) × (gradients + activations of one shard); activations are
what a shard's forward pass keeps for its backward pass. evenstep keeps freed memory for the next
step (each lane has its own); in the rows `gives back at once` that is switched off, and malloc
returns every freed block of 64 KiB and more to the system: what is in use at one time remains."""


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    settings = document["settings"]
    tables = [_network(document, network) for network in document["sizes"]]
    how = f"A batch of {settings['examples']}, V = {settings['shards']}, {settings['steps']} steps."
    return joined("## Memory", origin(document), f"{_TEXT} {how}", *tables, note(notes, "memory"))


def bound_bytes(one_device: float, devices: int, sizes: Mapping[str, int]) -> float:
    """Return what `devices` devices may take where one takes `one_device` (issue 2)."""
    return one_device + (devices - 1) * (sizes["gradients_bytes"] + sizes["activations_bytes"])


def _network(document: dict[str, Any], network: str) -> str:
    sizes = document["sizes"][network]
    text = (
        f"{LABELS[network]}: gradients {mebibytes(sizes['gradients_bytes'])} MiB, activations of a "
        f"shard {sizes['activations_bytes'] / 2**20:.1f} MiB."
    )
    head = ("malloc", "devices", "peak, MiB", "least to most", "bound, MiB", "verdict")
    rows = [row for malloc in MALLOCS for row in _rows(document, network, malloc)]
    return joined(text, table(head, rows))


def _rows(document: dict[str, Any], network: str, malloc: str) -> list[list[str]]:
    peaks = _peaks(document, network, malloc)
    if 1 not in peaks:
        return []
    rows = []
    for devices, peak in sorted(peaks.items()):
        bound = bound_bytes(peaks[1].median, devices, document["sizes"][network])
        rows.append(
            [
                MALLOCS[malloc],
                str(devices),
                mebibytes(peak.median),
                f"{mebibytes(peak.least)} to {mebibytes(peak.most)}",
                mebibytes(bound) if devices > 1 else NOTHING,
                verdict(peak.median <= bound) if devices > 1 else NOTHING,
            ]
        )
    return rows


def _peaks(document: dict[str, Any], network: str, malloc: str) -> dict[int, Summary]:
    values: dict[int, list[float]] = {}
    for run in document["runs"]:
        if (run["network"], run["malloc"]) == (network, malloc):
            values.setdefault(run["devices"], []).append(run["peak_bytes"])
    return {devices: summarise(peaks) for devices, peaks in values.items()}
