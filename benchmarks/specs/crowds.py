"""Many processes: what each holds, how long they take to start and to step, and what cables carry.

On one machine they are started by torchrun. Machines are network namespaces of this one, each with
a cable to a switch; root is needed for them, and `tc` with a token bucket.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark import Benchmark, Contender, column
from crowds import figures, on_machines
from evenstep.bench.rounds import Run
from evenstep.bench.tables import Table, cells, median
from launched import torchrun

LIMIT_S = 1200
ONE_MACHINE = {"shards": 64, "steps": 50, "width": 64}
MACHINES = {"shards": 8, "steps": 8, "width": 8192, "rate": "1gbit"}
PROCESSES = (1, 2, 4, 8, 16, 32, 64)
SIZES = ((2, 2), (1, 1, 1, 1), (2, 2, 2, 2), (1,) * 8)
HELD = ("sockets", "memory_files", "files", "memory_maps", "threads")
KINDS = ("step_ms", "own_MiB", "gradient_bytes", *HELD)


def measure(contender: Contender) -> dict[str, Any]:
    """Return what the process that has most of it holds or takes, and the fingerprint of all."""
    job = contender.job
    with tempfile.TemporaryDirectory() as folder:
        given = folder, job["shards"], job["steps"], job["width"]
        began_s = time.time()
        if "sizes" in job:
            each = on_machines(folder, job["sizes"], job["rate"], *given[1:])
        else:
            each = on_one_machine(job["processes"], *given)
    (fingerprint,) = {one["fingerprint"] for one in each}
    most = {kind: max(one[kind] for one in each) for kind in ("opened_at_s", *KINDS)}
    return {
        "started_s": most.pop("opened_at_s") - began_s,
        **most,
        "messages": max(one["a_step"]["messages"] for one in each),
        "cable_bytes": max(nbytes for one in each for nbytes in one["cable"]),
        "fingerprint": fingerprint,
    }


def on_one_machine(processes: int, folder: str, *arguments: int) -> list[dict[str, Any]]:
    """Train in so many processes; return the figures of each."""
    finished = torchrun(processes, "crowd.py", folder, *arguments, timeout_s=LIMIT_S)
    if finished.returncode:
        raise RuntimeError(finished.stderr)
    return figures(folder, processes)


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of one machine and that of several."""
    measured = [*BENCHMARK.measured(document)]
    crowd = [held_row(one, runs) for one, runs in measured if "sizes" not in one.job]
    machines = [sent_row(one, runs) for one, runs in measured if "sizes" in one.job]
    head = ("started, s", "a step, ms", "spread")
    held = ("own memory, MiB", "sockets", "memory files", "files", "memory maps", "threads")
    sent = ("MB of a step", "least", "ratio", "spread of it", "messages")
    return {
        "one_machine": Table(("processes", *head, *held), crowd),
        "machines": Table(("machines × processes", *head, *sent), machines),
    }


def held_row(one: Contender, runs: Sequence[Run]) -> list[str]:
    """Return the row of processes on one machine."""
    held = [median(column(runs, kind), "{:.0f}".format) for kind in ("own_MiB", *HELD)]
    return [one.label, *_times(runs), *held]


def sent_row(one: Contender, runs: Sequence[Run]) -> list[str]:
    """Return the row of machines: what crosses a cable, and the least for each way."""
    machines = len(one.job["sizes"])
    least = [2 * nbytes * (machines - 1) / machines for nbytes in column(runs, "gradient_bytes")]
    crossed = column(runs, "cable_bytes")
    ratios = [nbytes / bound for nbytes, bound in zip(crossed, least, strict=True)]
    megabytes = [median([nbytes / 1e6 for nbytes in some]) for some in (crossed, least)]
    messages = median(column(runs, "messages"), "{:.0f}".format)
    return [one.label, *_times(runs), *megabytes, *cells(ratios, unit="×"), messages]


def _times(runs: Sequence[Run]) -> list[str]:
    return [median(column(runs, "started_s")), *cells(column(runs, "step_ms"))]


def _contender(key: str, label: str, job: Mapping[str, Any]) -> Contender:
    return Contender(key=key, label=label, module="crowds", job=job, names={"variant": key})


BENCHMARK = Benchmark(
    name="crowds",
    settings={"one_machine": ONE_MACHINE, "machines": MACHINES},
    contenders=[
        *(
            _contender(f"processes.{count}", f"{count}", {**ONE_MACHINE, "processes": count})
            for count in PROCESSES
        ),
        *(
            _contender(
                f"machines.{len(sizes)}x{sizes[0]}",
                f"{len(sizes)} × {sizes[0]}",
                {**MACHINES, "sizes": sizes},
            )
            for sizes in SIZES
        ),
    ],
    tables=tables,
    measure=measure,
    rounds=3,
)
