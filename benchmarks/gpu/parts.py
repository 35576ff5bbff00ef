"""The parts: each is a function of the accelerator's type that returns figures for the JSON."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed, nn

import evenstep
from evenstep.bench.workload.kinds import find_workload
from gpu import place

Figures = Mapping[str, Any]
ROUNDS = 5
TOLERANCE = 2e-2
"""The most by which losses of a few steps may differ from a CPU's, relatively."""


# ---- trainings


class Case:
    """A network with its batches, and how it is trained.

    Args:
        name: the network.
        examples: the rows of a batch.
        image: the shape of an image; None for text.
        precision: "fp32", "tf32" (single precision whose products may be rounded to TF32) or
            "bf16".
    """

    def __init__(
        self, name: str, examples: int, image: tuple[int, ...] | None, precision: str = "fp32"
    ) -> None:
        self.name, self.examples, self.image, self.precision = name, examples, image, precision

    def sized(self, quick: bool) -> Case:
        """Return the case, with small batches if it is to be quick."""
        if not quick:
            return self
        image = None if self.image is None else (1, 28, 28)
        return Case(
            {"chargpt": "chargpt-small"}.get(self.name, self.name), 8, image, self.precision
        )

    @property
    def workload(self) -> Any:
        """The model's training."""
        return find_workload(self.name)

    def make_model(self) -> nn.Module:
        """Return the network, with the same weights each time, on the CPU."""
        torch.manual_seed(0)
        model = self.workload.make_network()
        if self.image is not None:
            model.eval()(torch.zeros(2, *self.image))  # lazy layers
        return model.train()

    def batches(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield batches on the CPU, the same ones again and again."""
        if self.image is None:
            made = [self.workload.make_examples(self.examples)] * 2
        else:
            drawn = torch.Generator().manual_seed(3)
            made = [
                (
                    torch.randn(self.examples, *self.image, generator=drawn),
                    torch.randint(10, (self.examples,), generator=drawn),
                )
                for _ in range(2)
            ]
        return itertools.cycle(made)

    def set_precision(self) -> None:
        """Let products of single precision be rounded to TF32, or not."""
        rounds = self.precision == "tf32"
        torch.set_float32_matmul_precision("high" if rounds else "highest")
        torch.backends.cudnn.allow_tf32 = rounds

    def loss(self, device: str, model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, as a plain loop computes it."""
        with torch.autocast(device, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.workload.loss(model, *batch)

    def trainer(self, devices: Any, shards: int = 8, **options: Any) -> evenstep.Trainer:
        """Return a trainer of the network."""
        model = self.make_model()
        precision = "bf16" if self.precision == "bf16" else "fp32"
        return evenstep.Trainer(
            model,
            self.workload.make_optimizer(model),
            objective=self.workload.objective,
            devices=devices,
            experiment=evenstep.Experiment(shards=shards, precision=precision),
            **options,
        )


LENET = Case("lenet", 256, (1, 28, 28))
RESNET = Case("resnet18", 256, (1, 64, 64))
GPT = Case("chargpt", 64, None)
SMALL_GPT = Case("chargpt-small", 12, None)


# ---- what must hold


def facts(device: str, *, quick: bool) -> Figures:
    """Return what the machine is."""
    return place.facts(device)


def tests(device: str, *, quick: bool) -> Figures:
    """Run the tests that are for an accelerator of any kind."""
    command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts="] + ["--accelerator"] * (device == place.EMULATED)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place.ROOT)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"holds": done.returncode == 0, "outcome": lines[-1], "failed": failed[:20]}


def sameness(case: Case, device: str, *, quick: bool) -> Figures:
    """Train on one device, again, on it listed twice, in flight, and on a CPU; compare."""
    case, steps = case.sized(quick), 3 if quick else 10
    case.set_precision()
    one = f"{device}:0"
    layouts: dict[str, dict[str, Any]] = {
        "one": {"devices": one},
        "again": {"devices": one},
        "twice": {"devices": [one, one]},
        "in flight": {"devices": one, "max_in_flight": 2},
    }
    count = torch.get_device_module(device).device_count()
    if count > 1:
        layouts["all"] = {"devices": [f"{device}:{number}" for number in range(count)]}
    prints, losses = {}, {}
    for name, layout in layouts.items():
        prints[name], losses[name] = _train(case, steps, layout)
    found: dict[str, Any] = {"holds": len({*prints.values()}) == 1, "fingerprints": prints}
    if case.examples <= 64 or case is LENET or quick:
        _, on_a_cpu = _train(case, 3, {"devices": "cpu:0"})
        pairs = zip(on_a_cpu, losses["one"], strict=False)
        found["from a CPU"] = max(abs(one / other - 1) for one, other in pairs)
        found["holds"] = found["holds"] and found["from a CPU"] < TOLERANCE
    return found


def _train(case: Case, steps: int, layout: Mapping[str, Any]) -> tuple[str, list[float]]:
    with case.trainer(**layout) as trainer:
        handles = [trainer.step(*batch) for batch in itertools.islice(case.batches(), steps)]
        return trainer.fingerprint(), [*map(float, handles)]


# ---- speed


def speed(case: Case, device: str, *, quick: bool) -> Figures:
    """Time steps of a plain loop, a compiled one, DDP in one process, and evenstep."""
    case, steps = case.sized(quick), 2 if quick else 20
    case.set_precision()
    contenders: dict[str, Callable[[], Callable[[], object]]] = {
        "plain": functools.partial(_plain, case, device),
        "compiled": functools.partial(_plain, case, device, wrap=torch.compile),
        "ddp": functools.partial(_plain, case, device, wrap=_ddp),
        **{
            f"evenstep V={shards}": functools.partial(_evenstep, case, device, shards)
            for shards in (1, 2, 8)
        },
        "evenstep V=2 in flight": functools.partial(_evenstep, case, device, 2, max_in_flight=2),
    }
    if device == place.EMULATED:  # has neither a compiler nor collectives
        del contenders["compiled"], contenders["ddp"]
    found: dict[str, Any] = {}
    steppers: dict[str, Callable[[], object]] = {}
    for name, make in contenders.items():
        step = _warmed_up(make)
        if isinstance(step, str):
            found[name] = {"error": step}
        else:
            steppers[name] = step
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(1 if quick else ROUNDS):  # interleaved
        for name, step in steppers.items():
            times[name].append(_timed(step, steps) / steps)
    for step in steppers.values():
        _close(step())
    for name, measured in times.items():
        median = statistics.median(measured)
        found[name] = {
            "ms": [round(1e3 * one, 4) for one in measured],
            "examples_per_s": round(case.examples / median, 1),
        }
    has_failed = any("error" in one for name, one in found.items() if name.startswith("evenstep"))
    return {
        "examples": case.examples,
        "precision": case.precision,
        "holds": not has_failed,
        "contenders": found,
    }


def _warmed_up(make: Callable[[], Callable[[], object]]) -> Callable[[], object] | str:
    """Return a contender's step, taken three times; its error if there is one."""
    try:
        step = make()
        _timed(step, 3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return step


def _timed(step: Callable[[], object], steps: int) -> float:
    place.synchronize()
    began_s = time.perf_counter()
    for _ in range(steps):
        last = step()
    if isinstance(last, evenstep.Trainer):
        last.waitall()
    place.synchronize()
    return time.perf_counter() - began_s


def _close(last: object) -> None:
    """Close the trainer, if that is what a step has returned."""
    if isinstance(last, evenstep.Trainer):
        last.close()


def _plain(
    case: Case, device: str, wrap: Callable[[nn.Module], Any] = lambda model: model
) -> Callable[[], object]:
    model = case.make_model().to(f"{device}:0")
    optimizer, model = case.workload.make_optimizer(model), wrap(model)
    batches = case.batches()

    def step() -> None:
        batch = [one.to(f"{device}:0", non_blocking=True) for one in next(batches)]
        optimizer.zero_grad()
        case.loss(device, model, *batch).backward()
        optimizer.step()

    return step


def _ddp(model: nn.Module) -> nn.Module:
    if not distributed.is_initialized():
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
        distributed.init_process_group("nccl", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


def _evenstep(case: Case, device: str, shards: int, **options: Any) -> Callable[[], object]:
    trainer = case.trainer(f"{device}:0", shards, **options).open()
    batches = case.batches()

    def step() -> evenstep.Trainer:
        trainer.step(*next(batches))
        return trainer

    return step


def overhead(device: str, *, quick: bool) -> Figures:
    """Time steps of a small network, of which the host's work is nearly all."""
    case = Case("mlp", 64, (1, 28, 28))
    return speed(case, device, quick=quick)


# ---- memory, waits


def memory(case: Case, device: str, *, quick: bool) -> Figures:
    """Return the peak memory of tensors: of a plain loop, then of evenstep."""
    case = case.sized(quick)
    found = {}
    makers = {"plain": functools.partial(_plain, case, device)} | {
        f"evenstep V={shards}": functools.partial(_evenstep, case, device, shards)
        for shards in (1, 8)
    }
    for name, make in makers.items():
        module: Any = torch.get_device_module(device)
        if hasattr(module, "reset_peak_memory_stats"):
            torch.accelerator.empty_cache()
            module.reset_peak_memory_stats()
        before = place.peak_bytes(device)
        step = make()
        _timed(step, 3)
        peak = place.peak_bytes(device)
        found[name] = None if peak is None or before is None else peak - before
        _close(step())
        del step
    return {"peak_bytes": found}


def waits(device: str, *, quick: bool) -> Figures:
    """Count the blocking waits of the host in a step that checks nothing."""
    case = SMALL_GPT.sized(quick)
    with case.trainer(f"{device}:0") as trainer:
        batches, found = case.batches(), []
        for _ in range(7):
            with place.counted_waits(device) as counted:
                float(trainer.step(*next(batches)))
            found += counted
    return {"waits": found, "holds": max(found[number] for number in (2, 4, 5, 6)) <= 2}


# ---- the engine, as in the book's chapters on asynchronous computation


def engine(device: str, *, quick: bool) -> Figures:
    """Copy results to the CPU while the next ones are computed (the book's section 13.3)."""
    size, count = (64, 8) if quick else (2_000, 50)
    x = torch.rand(size, size, device=f"{device}:0")
    one = f"{device}:0"

    def computed(runs: evenstep.Engine) -> list[Any]:
        return [runs.submit(torch.mm, x, x, device=one) for _ in range(count)]

    def copied(runs: evenstep.Engine, results: list[Any]) -> None:
        for handle in [runs.copy(result, "cpu:0") for result in results]:
            handle.wait_to_read()

    found: dict[str, list[float]] = {"computing": [], "copying": [], "overlapped": []}
    with evenstep.Engine([one, "cpu:0"]) as runs:
        for number in range(2 if quick else ROUNDS + 1):
            place.synchronize()
            began_s = time.perf_counter()
            results = computed(runs)
            runs.waitall()
            place.synchronize()
            between_s = time.perf_counter()
            copied(runs, results)
            ended_s = time.perf_counter()
            copied(runs, computed(runs))
            last_s = time.perf_counter()
            if number:  # the first is a warm-up
                found["computing"].append(between_s - began_s)
                found["copying"].append(ended_s - between_s)
                found["overlapped"].append(last_s - ended_s)
    return {"seconds": {name: statistics.median(times) for name, times in found.items()}}


def _named(name: str, function: Callable[..., Figures], cases: Mapping[str, Case]) -> Any:
    return {f"{name}.{key}": functools.partial(function, case) for key, case in cases.items()}


PARTS: Mapping[str, Callable[..., Figures]] = MappingProxyType(
    {
        "facts": facts,
        "tests": tests,
        **_named("sameness", sameness, {"lenet": LENET, "resnet18": RESNET, "gpt": SMALL_GPT}),
        "waits": waits,
        "overhead": overhead,
        "engine": engine,
        **_named("memory", memory, {"resnet18": RESNET, "gpt": GPT}),
        **_named(
            "speed",
            speed,
            {
                "lenet": LENET,
                "gpt.bf16": Case("chargpt", 64, None, "bf16"),
                "resnet18.fp32": RESNET,
                "resnet18.bf16": Case("resnet18", 256, (1, 64, 64), "bf16"),
                "resnet18.tf32": Case("resnet18", 256, (1, 64, 64), "tf32"),
                "gpt.tf32": Case("chargpt", 64, None, "tf32"),
            },
        ),
    }
)
"""By name, in the order of their worth."""
