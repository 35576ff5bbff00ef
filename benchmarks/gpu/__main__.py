"""Measure evenstep on an accelerator, and write one JSON file.

    python -m gpu --device cuda --out gpu.json      (in the folder benchmarks; or: make gpu)

Needs no more than evenstep and pytest, and installs nothing. Each part runs in a process of its own
with a limit; the file is written after each, so that a run that is cut off leaves what it has.
`--device emu` is the emulated accelerator of the tests, which shows that the parts work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep.bench.results import Record
from gpu import parts, place

FOLDER = Path(__file__).resolve().parent
LIMIT_S = 120
_SHOWN = 600  # characters of an error


def main() -> int:
    """Measure all parts; return 1 if the tests or a comparison of bits failed."""
    options = parse()
    if options.part:
        place.prepare(options.device)
        print(json.dumps(parts.PARTS[options.part](options.device, quick=options.quick)))
        return 0
    names = [name for name in parts.PARTS if name.startswith(options.only)]
    until_s = time.monotonic() + 60 * options.minutes
    record = Record("gpu", f"make gpu DEVICE={options.device}", options.out, device=options.device)
    if options.revision:
        record.document["machine"]["git_revision"] = options.revision
    has_failed = False
    for name in names:
        began_s = time.monotonic()
        limit_s = min(LIMIT_S, until_s - began_s)
        found = measured(name, options, limit_s) if limit_s > 5 else {"error": "no time was left"}
        run = {"part": name, "seconds": round(time.monotonic() - began_s, 1), **found}
        record.add(run)
        has_failed |= found.get("holds") is False or "error" in found
        print(f"{name}: {json.dumps(found)}", flush=True)
    return int(has_failed)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="the type of the accelerator")
    parser.add_argument("--out", type=Path, default=None, help="the JSON file")
    parser.add_argument("--minutes", type=float, default=9, help="the time for all parts")
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps")
    parser.add_argument("--only", default="", help="the beginning of the parts' names")
    parser.add_argument("--revision", default="", help="of the sources, where git can't tell")
    parser.add_argument("--part", default="", choices=["", *parts.PARTS], help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(name: str, options: argparse.Namespace, limit_s: float) -> Mapping[str, Any]:
    """Return what a part finds in a process of its own; its error if it fails or takes too long."""
    command = [sys.executable, "-m", "gpu", "--part", name, "--device", options.device]
    command += ["--quick"] * options.quick
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            cwd=FOLDER.parent,
            env=place.environment(),
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit_s:.0f} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-_SHOWN:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
