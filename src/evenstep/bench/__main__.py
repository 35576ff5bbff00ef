"""Measure a job in this process: `python -m evenstep.bench MODULE JOB`, the job as JSON."""

from __future__ import annotations

import importlib
import json
import sys

if __name__ == "__main__":
    found = importlib.import_module(sys.argv[1]).measure(json.loads(sys.argv[2]))
    if found is not None:  # of several processes, one prints
        print(json.dumps(found), flush=True)
