"""Two machines with a cable of 1 Gbit/s between them: ResNet-18 in training, against DDP.

    python benchmarks/cable.py --rounds 5

The machines are two network namespaces of this one (root is needed, and `tc` with a token bucket),
so that each has one core. Every variant runs once a round, in fresh processes, in rotating order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenstep.bench import fresh
from evenstep.bench.rounds import rotated, summarise
from lineup import STEPS
from records import RESULTS, Record

RATE = "1gbit"
MACHINES = {"evenstep-bench-a": "10.213.80.1", "evenstep-bench-b": "10.213.80.2"}
EXAMPLES = 128
LIMIT_S = 600
VARIANTS = {
    "evenstep": "evenstep, V = 8",
    "evenstep.2": "evenstep, V = 2",
    "ddp": "DDP",
    "ddp.channels_last": "DDP, channels-last",
}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "evenstep": ("evenstep_processes", {"memory_format": "auto"}),
    "evenstep.2": ("evenstep_processes", {"memory_format": "auto", "shards": 2}),
    "ddp": ("ddp", {"memory_format": "contiguous"}),
    "ddp.channels_last": ("ddp", {"memory_format": "channels_last"}),
}


def main() -> None:
    """Run the rounds, write the file, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "cable.json")
    options = parser.parse_args()
    warmup, steps = STEPS["resnet18"]
    common = {"network": "resnet18", "examples": EXAMPLES, "workers": 2}
    common |= {"warmup_steps": warmup, "steps": steps}
    record = Record("cable", options.out, settings={"rate": RATE, **common}, variants=VARIANTS)
    with cable():
        for number in range(options.rounds):
            for variant in rotated(list(VARIANTS), number):
                module, job = JOBS[variant]
                measured = on_both(module, {**common, **job})
                speed = measured["examples_per_s"]
                record.add({"round": number, "variant": variant, "examples_per_s": speed})
                print(f"{number} {VARIANTS[variant]} {speed:.1f} examples/s", file=sys.stderr)
    for variant, label in VARIANTS.items():
        runs = [run for run in record.document["runs"] if run["variant"] == variant]
        print(
            f"{label:20} {summarise([run['examples_per_s'] for run in runs]).median:.1f} a second"
        )


@contextlib.contextmanager
def cable() -> Iterator[None]:
    """Two namespaces with a veth pair, each end of which lets RATE through."""
    first, second = MACHINES
    try:
        for machine in MACHINES:
            ip("netns", "add", machine)
        ends = [("eth0", "netns", machine) for machine in MACHINES]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for machine, address in MACHINES.items():
            ip("-n", machine, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", machine, "link", "set", "eth0", "up")
            ip("-n", machine, "link", "set", "lo", "up")
            bucket = ["root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms"]
            ip("netns", "exec", machine, "tc", "qdisc", "add", "dev", "eth0", *bucket)
        yield
    finally:
        for machine in (first, second):
            subprocess.run(["ip", "netns", "del", machine], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    """Run the command `ip`."""
    subprocess.run(["ip", *arguments], check=True)


def on_both(module: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a module under torchrun on both machines; return what the first one prints."""
    address = next(iter(MACHINES.values()))
    environment = fresh.clean_environment(os.environ)
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", machine, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"{address}:29511", "--rdzv-id", "cable"),
                *("--local-addr", own, "--rdzv-conf", f"is_host={int(own == address)}"),
                *("-m", f"evenstep.bench.contenders.{module}", json.dumps(job)),
            ],
            cwd=Path(__file__).resolve().parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine, own in MACHINES.items()
    ]
    try:
        told = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    lines = [fresh.last_json_line(out) for out, _ in told]
    found = next((line for line in lines if line is not None), None)
    if found is None:
        raise fresh.RunFailedError(f"{module} failed", "\n".join(errors for _, errors in told))
    return found


if __name__ == "__main__":
    main()
