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

from evenstep.bench import Record, fresh
from gpu import parts, place

LIMIT_S = 120
_SHOWN = 600  # characters of an error


def main() -> int:
    """Measure all parts; return 1 if the tests or a comparison of bits failed."""
    options = parse()
    until_s = time.monotonic() + 60 * options.minutes
    record = Record("gpu", f"make gpu DEVICE={options.device}", options.out, device=options.device)
    if options.revision:
        record.document["machine"]["git_revision"] = options.revision
    has_failed = False
    left_out = parts.NOT_QUICK if options.quick else ()
    for name in parts.PARTS:
        if not name.startswith(options.only) or name in left_out:
            continue
        began_s = time.monotonic()
        job = {"part": name, "device": options.device, "quick": options.quick}
        found = measured(job, min(LIMIT_S, until_s - began_s))
        record.add({"part": name, "seconds": round(time.monotonic() - began_s, 1), **found})
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
    return parser.parse_args()


def measured(job: Mapping[str, Any], limit_s: float) -> Mapping[str, Any]:
    """Return what a part finds in a process of its own; its error if it fails or takes too long."""
    if limit_s < 5:
        return {"error": "no time was left"}
    try:
        return fresh.run_module(
            "gpu.parts",
            job,
            folder=place.ROOT / "benchmarks",
            variables=place.environment(),
            timeout_s=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit_s:.0f} s"}
    except fresh.RunFailedError as error:
        return {"error": str(error).strip()[-_SHOWN:]}


if __name__ == "__main__":
    sys.exit(main())
