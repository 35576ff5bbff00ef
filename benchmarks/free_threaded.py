"""Trains on two devices with an ordinary Python and with a free-threaded one, in turn.

    python benchmarks/free_threaded.py PYTHON FREE_PYTHON [--rounds 5] [--out FILE]

Each is the path of an interpreter whose packages are evenstep's. They take turns, so that whatever
else the machine does meets both; ratios are taken within a round. An experiment: torch has an open
crash in concurrent allocation (pytorch#171992), and evenstep is not developed for it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

JOBS = {
    "LeNet": {"network": "lenet", "examples": 256, "warmup_steps": 10, "steps": 60},
    "nanoGPT, small": {"network": "chargpt-small", "examples": 64, "warmup_steps": 1, "steps": 6},
}
VERSION = "import sys, torch; print(sys.version.split()[0], torch.__version__, sep=', torch ')"
HAS_LOCK = "import sys, evenstep; evenstep.Trainer; print(getattr(sys, '_is_gil_enabled', bool)())"


def said(python, *arguments):
    """Return the last line that an interpreter prints; PYTHON_GIL=0 keeps it without a lock."""
    free = {"PYTHON_GIL": "0"} if "free-threading" in version_of(python) else {}
    done = subprocess.run(
        [python, *arguments], env={**os.environ, **free}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def version_of(python):
    """Return what an interpreter calls itself."""
    code = "import sys; print(sys.version)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout


def steps_per_s(python, job, devices):
    """Return the speed of a training on some devices."""
    line = said(python, "-m", "evenstep.bench.contenders", json.dumps({**job, "workers": devices}))
    return job["steps"] / json.loads(line)["seconds"]


def main():
    """Measure, print, and write what was found."""
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("python")
    given.add_argument("free_python")
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--out", type=Path, default=None)
    given = given.parse_args()
    pythons = {"ordinary": given.python, "free-threaded": given.free_python}
    found = {
        "load_average_at_start": os.getloadavg()[0],
        "versions": {kind: said(one, "-c", VERSION) for kind, one in pythons.items()},
        "has_lock": said(given.free_python, "-c", HAS_LOCK),
        "rounds": [],
    }
    for _ in range(given.rounds):
        found["rounds"].append(
            {
                name: {
                    f"{kind}, {devices}": steps_per_s(python, job, devices)
                    for kind, python in pythons.items()
                    for devices in (1, 2)
                }
                for name, job in JOBS.items()
            }
        )
        print(json.dumps(found["rounds"][-1]), flush=True)
    found["ratios"] = {
        f"{name}, {devices} devices": statistics.median(
            one[name][f"free-threaded, {devices}"] / one[name][f"ordinary, {devices}"]
            for one in found["rounds"]
        )
        for name in JOBS
        for devices in (1, 2)
    }
    print(json.dumps({key: found[key] for key in found if key != "rounds"}, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
