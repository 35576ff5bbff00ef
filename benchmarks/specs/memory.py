"""Peak memory of training on 1, 2, 3 and 4 CPU devices, beside its bound.

The bound on k devices is the peak of one device + (k - 1) x (gradients + activations of one shard).
Each peak is measured twice: as a user sees it, and with a malloc that returns every freed block of
64 KiB or more to the system, without evenstep's own keeping of freed memory. The difference is
memory that is kept for the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from benchmark import ALLOCATORS, Benchmark, Contender, column, cpus, script
from evenstep.bench import machine, running, summarise
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import NOTHING, Table, cells, verdict

WIDTH = 2048
SETTINGS = {"shards": 8, "examples": 64, "steps": 4}
NETWORKS = ("resnet18", "mlp")
DEVICES = (1, 2, 3, 4)
MALLOCS = {"default": "as evenstep sets it", "gives_back": "returns it at once"}
HEAD = ("malloc", "devices", "peak, MiB", "least to most", "bound, MiB", "verdict")

Batch = tuple[torch.Tensor, torch.Tensor]


def measure(job: Mapping[str, Any]) -> dict[str, int]:
    """Return the peak memory before and after the training, or the sizes."""
    model, batch = _make(job["network"], job["examples"])
    if job["devices"] == 0:
        return _sizes(model, batch, job["shards"])
    before = machine.peak_memory_bytes()
    given = model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss()
    layout = evenstep.Layout(tune_malloc=job["malloc"] == "default")  # it overrides the variable
    options = {"devices": cpus(job["devices"]), "shards": job["shards"], "layout": layout}
    with evenstep.Trainer(*given, **options) as trainer:
        for _ in range(job["steps"]):
            trainer.step(*batch)
    return {"before_bytes": before, "peak_bytes": machine.peak_memory_bytes()}


def _make(network: str, examples: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    labels = torch.randint(10, (examples,))
    if network == "resnet18":
        return evenstep.models.resnet18(), (torch.randn(examples, 1, 28, 28), labels)
    model = evenstep.models.mlp(WIDTH, hidden=(WIDTH,) * 3, num_classes=WIDTH)
    return model, (torch.randn(examples, WIDTH), labels)


def _sizes(model: nn.Module, batch: Batch, shards: int) -> dict[str, int]:
    """Return the bytes of the gradients, and of the activations of one shard.

    Activations are what the forward pass keeps for the backward pass. Every storage counts once,
    and those of the parameters not at all.
    """
    x, y = (tensor[: -(-len(tensor) // shards)].clone() for tensor in batch)
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is reused

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.cross_entropy(model(x), y, reduction="sum")
    return {
        "gradients_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "activations_bytes": sum(storage.nbytes() for storage in kept.values()),
    }


def contender(network: str, devices: int, malloc: str) -> Contender:
    """Return a training on some devices; 0 devices return the sizes that the bound consists of."""
    names = {"network": network, "devices": devices, "malloc": malloc}
    more = {"names": names, "environment": ALLOCATORS[malloc]}
    return script("memory", f"{network}.{devices}.{malloc}", {**names, **SETTINGS}, **more)


def measure_sizes() -> dict[str, Any]:
    """Return the bytes of gradients and activations of each network."""
    found = {network: running.measure(contender(network, 0, "default")) for network in NETWORKS}
    return {"sizes": found}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return a table for each network."""
    found = {}
    for network, sizes in document["sizes"].items():
        runs = select(document["runs"], network=network)
        rows = [row for malloc in MALLOCS for row in _rows(runs, sizes, malloc)]
        found[network] = Table(HEAD, rows)
    return found


def _rows(runs: list[Run], sizes: Mapping[str, int], malloc: str) -> list[list[str]]:
    own = select(runs, malloc=malloc)
    peaks = {number: column(select(own, devices=number), "peak_bytes") for number in DEVICES}
    found = []
    for devices, peak in peaks.items() if peaks[1] else ():
        bound, judged = NOTHING, NOTHING
        if devices > 1:
            bytes_ = bound_bytes(summarise(peaks[1]).median, devices, sizes)
            bound, judged = _mebibytes(bytes_), verdict(peak, at_most=bytes_)[1]
        if peak:
            found.append([MALLOCS[malloc], str(devices), *cells(peak, _mebibytes), bound, judged])
    return found


def bound_bytes(one_device: float, devices: int, sizes: Mapping[str, int]) -> float:
    """Return the bound on `devices` devices, for a peak of `one_device` bytes on one device."""
    return one_device + (devices - 1) * (sizes["gradients_bytes"] + sizes["activations_bytes"])


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f}"


BENCHMARK = Benchmark(
    name="memory",
    rounds=3,
    settings=SETTINGS,
    fields=measure_sizes,
    contenders=[
        contender(network, devices, malloc)
        for network in NETWORKS
        for devices in DEVICES
        for malloc in MALLOCS
    ],
    tables=tables,
)
