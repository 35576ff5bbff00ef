"""The book's measurements of one process: each is taken in a fresh one, by `measure(job)`.

They are written once over what runs the operations: evenstep's engine, bare threads (the limit for
any engine on threads), or `evenstep.mxnet` (in `seeds`).
"""

from __future__ import annotations

import contextlib
import functools
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.utils.benchmark import Timer

import evenstep
from evenstep.bench import machine

Job: TypeAlias = Mapping[str, Any]
Call: TypeAlias = Callable[[], Any]
"""Submits an operation, and returns what its result can be waited for with."""

DEVICES = ("cpu:0", "cpu:1")
HERE, THERE = "cpu:0", "cpu:1:own"  # of copies
WARMUP = 3  # calls on each device
FEATURES, HIDDEN = 512, (2048, 512)
MAX_IN_FLIGHT = {"waits": None, "none": None, "two": 2}


class Runner(Protocol):
    """What runs operations on two devices."""

    def call(self, operation: str, size: int, device: str | None = None) -> Call:
        """Return what submits "add" or "mm" of (size, size), on a device or any free one."""

    def many(self, call: Call, count: int, *, waits: bool) -> None:
        """Submit it so often, and wait for each result, or for all at the end."""

    def waitall(self) -> None:
        """Wait for everything that was submitted."""


class OnEngine(contextlib.ExitStack):
    """Runs operations by evenstep's engine."""

    def __init__(self, devices: Sequence[str] = DEVICES) -> None:
        super().__init__()
        self.engine = self.enter_context(evenstep.Engine(devices=devices))
        self.waitall = self.engine.waitall

    def call(self, operation: str, size: int, device: str | None = None) -> Call:
        """Return what submits it."""
        return functools.partial(self.engine.submit, *_operation(operation, size), device=device)

    def many(self, call: Call, count: int, *, waits: bool) -> None:
        """Submit it so often."""
        repeat(call, count, waits=waits)
        self.waitall()

    def copy(self, product: Any) -> Any:
        """Submit a copy of a product."""
        return self.engine.copy(product, THERE)


class OnThreads(contextlib.ExitStack):
    """A thread with a queue for each device and nothing else, with one intra-op thread each."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = {
            name: self.enter_context(ThreadPoolExecutor(1, initializer=_use_one_thread))
            for name in DEVICES
        }
        self._running: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], *arguments: Any, device: str) -> Future[Any]:
        """Call `function` in the thread of a device, after what was submitted there before."""
        self._running.append(self._threads[device].submit(function, *arguments))
        return self._running[-1]

    def call(self, operation: str, size: int, device: str | None = None) -> Call:
        """Return what submits it."""
        given = _operation(operation, size)
        return functools.partial(self.submit, *given, device=device or DEVICES[0])

    def many(self, call: Call, count: int, *, waits: bool) -> None:
        """Let one thread make all calls instead of waiting, or two half of them each."""
        assert isinstance(call, functools.partial)
        function, *arguments = call.args
        once = functools.partial(function, *arguments)
        shares = [count] if waits else [count - count // 2, count // 2]
        for share, device in zip(shares, DEVICES, strict=False):
            self.submit(repeat, once, share, device=device)
        self.waitall()

    def copy(self, product: Any) -> Any:
        """Let the second thread wait for a product, and copy it."""
        return self.submit(lambda: product.result().clone(), device=DEVICES[1])

    def waitall(self) -> None:
        """Wait for all calls; raise the first error."""
        running, self._running = self._running, []
        for future in running:
            future.result()


def _use_one_thread() -> None:
    torch.get_num_threads()  # a thread's first use of torch would undo the setting
    torch.set_num_threads(1)


def _operation(name: str, size: int) -> tuple[Any, ...]:
    x = torch.rand(size, size)
    return (torch.add, x, 1) if name == "add" else (torch.mm, x, x)


def repeat(call: Call, count: int, *, waits: bool = False) -> None:
    """Call it so often, and wait for each result if asked for."""
    for _ in range(count):
        result = call()
        if waits:
            result.wait_to_read()


def queued(runner: Runner, job: Job, operation: str = "mm") -> dict[str, Any]:
    """Return the median seconds, over the repeats, until a call returned and until its result."""
    call, returned, finished = runner.call(operation, job["size"]), [], []
    for _ in DEVICES:
        call()
    runner.waitall()
    for _ in range(job["repeats"]):
        began = time.perf_counter()
        y = call()
        returned.append(time.perf_counter() - began)
        y.wait_to_read()
        finished.append(time.perf_counter() - began)
    return {"queued_s": statistics.median(returned), "finished_s": statistics.median(finished)}


def waiting(runner: Runner, job: Job) -> dict[str, Any]:
    """Return the seconds of `count` calls, waiting for each or once, and the process's page faults.

    Page faults (those that need no disk) come from memory that malloc returned to the system and
    requests again: a result of this size causes thousands or none, depending on malloc's history.
    """
    call, *warm = (runner.call(job["operation"], job["size"], one) for one in (None, *DEVICES))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for one in WARMUP * warm:
        one()
    runner.waitall()
    began = time.perf_counter()
    runner.many(call, job["count"], waits=job["waits"] == "each")
    seconds = time.perf_counter() - began
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"seconds": seconds, "page_faults": faults}


def together(runner: Runner, job: Job) -> dict[str, Any]:
    """Return the seconds of `count` products on each device: one after the other, or both."""
    calls = [runner.call("mm", job["size"], device) for device in DEVICES]
    for call in calls:
        call()
    runner.waitall()
    began, results = time.perf_counter(), []
    for call in calls:
        results += [call() for _ in range(job["count"])]
        if job["way"] == "apart":
            runner.waitall()
    runner.waitall()
    return {"seconds": time.perf_counter() - began}


def copies(job: Job) -> dict[str, Any]:
    """Return the median seconds of `count` products (size, inner) x (inner, size) and their copies.

    If both are done one after the other, also return their separate seconds, and the largest
    possible gain of overlapping: the sum of both over the longer one.
    """
    a, b = torch.rand(job["size"], job["inner"]), torch.rand(job["inner"], job["size"])
    is_engine, apart = job["contender"] == "engine", job["way"] == "apart"
    times = []
    with OnEngine((HERE, THERE)) if is_engine else OnThreads() as runner:
        submit = runner.engine.submit if isinstance(runner, OnEngine) else runner.submit
        for _ in range(1 + job["repeats"]):
            began = middle = time.perf_counter()
            products = [submit(torch.mm, a, b, device=HERE) for _ in range(job["count"])]
            if apart:
                runner.waitall()
                middle = time.perf_counter()
            copied = [runner.copy(product) for product in products]
            runner.waitall()
            del copied
            times.append((middle - began, time.perf_counter() - middle))
    del times[0]
    found = {"seconds": statistics.median(map(sum, times))}
    if not apart:
        return found
    compute_s, copy_s = map(statistics.median, zip(*times, strict=True))
    most_gain = statistics.median(sum(both) / max(both) for both in times)
    return {**found, "compute_s": compute_s, "copy_s": copy_s, "most_gain": most_gain}


def growth(train: Call, waitall: Callable[[], object], batches: int) -> dict[str, Any]:
    """Return the growth of the process while batches are trained on, and the seconds.

    Growth counts from the resident memory after one batch. The peak of that batch is included, so
    the figure is never too small. "made_s" are the seconds until all batches were submitted.
    """
    train()
    waitall()
    start_bytes, began = machine.resident_bytes(), time.perf_counter()
    for _ in range(batches):
        train()
    made_s = time.perf_counter() - began
    waitall()
    return {
        "peak_growth_bytes": machine.peak_memory_bytes() - start_bytes,
        "end_growth_bytes": machine.resident_bytes() - start_bytes,
        "made_s": made_s,
        "seconds": time.perf_counter() - began,
    }


def memory(job: Job) -> dict[str, Any]:
    """Return the memory of a training whose batches are made faster than they are trained on.

    As in the book: batches of noise, an MLP, no waiting for the loss. `maker` is what makes the
    batches: the training loop ("front"), or tasks ("tasks"), like every operator of MXNet. `bound`
    limits the queue: not at all ("none"), by `max_in_flight=2` ("two"), or by waiting for each loss
    ("waits").
    """
    wide, narrow = HIDDEN
    hidden = (nn.Linear(FEATURES, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU())
    net = nn.Sequential(*hidden, nn.Linear(narrow, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005)

    def step(network: object, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Take a step of SGD on the squared loss and return the loss."""
        optimizer.zero_grad()
        loss: torch.Tensor = ((net(x).squeeze(1) - y) ** 2 / 2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with evenstep.Engine(devices=DEVICES, max_in_flight=MAX_IN_FLIGHT[job["bound"]]) as engine:
        network = engine.Var(net, "the network")

        def make(function: Callable[..., Any], *shape: int) -> Any:
            in_front = job["maker"] == "front"
            return function(*shape) if in_front else engine.submit(function, *shape)

        def train() -> None:
            x, y = make(torch.randn, job["examples"], FEATURES), make(torch.ones, job["examples"])
            loss = engine.submit(step, network, x, y, writes=[network])
            if job["bound"] == "waits":
                loss.item()

        return growth(train, engine.waitall, job["batches"])


def hybrid_calls(job: Job) -> dict[str, Any]:
    """Return the shortest mean time per call of a small network, eager and hybridized.

    It is the book's: 1000 calls on one example, over `rounds` turns of `calls` calls each.
    """
    hidden = (nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
    net, x = nn.Sequential(*hidden, nn.Linear(128, 2)).eval(), torch.randn(1, 512)
    began = time.perf_counter()
    fast = evenstep.hybridize(net, x)
    found_s = time.perf_counter() - began
    timers = [Timer("call(x)", globals={"call": call, "x": x}) for call in (net, fast)]
    turns = [[one.timeit(job["calls"]).mean for one in timers] for _ in range(job["rounds"])]
    eager_s, hybrid_s = map(min, zip(*turns, strict=True))
    return {
        "eager_us": 1e6 * eager_s,
        "hybrid_us": 1e6 * hybrid_s,
        "way": fast.method.name,
        "ways_us": {method.name: method.call_us for method in fast.methods},
        "max_difference": fast.method.max_difference,
        "found_s": found_s,
    }


def measure(job: Job) -> dict[str, Any]:
    """Measure what the job names, with one intra-op thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    alone = {"copies": copies, "memory": memory, "hybrid_calls": hybrid_calls}
    if job["measure"] in alone:
        return alone[job["measure"]](job)
    over: Mapping[str, Callable[[Runner, Job], dict[str, Any]]]
    over = {"queued": queued, "waiting": waiting, "together": together}
    with OnThreads() if job.get("contender") == "bare" else OnEngine() as runner:
        return over[job["measure"]](runner, job)
