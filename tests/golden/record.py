"""Record the golden results on this machine: `python tests/golden/record.py [--only NAME]`.

Run it only where a change of bits is intended (another version of torch, another processor), and
say so in the commit. Results of other versions and processors are kept.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import runs
import torch
from where import environment, load, save


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="the name of one run; default: all")
    parser.add_argument("--missing", action="store_true", help="only the runs without a result")
    parser.add_argument("--layouts", type=int, help="compute each run on this many; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    document = load()
    results = document.setdefault(environment(), {})
    for name in [options.only] if options.only else runs.RUNS:
        if options.missing and name in results:
            continue
        found = runs.results_of(name, options.layouts)
        first, *others = found.values()
        if any(other != first for other in others):
            sys.exit(f"{name}: the layouts differ: {json.dumps(found, indent=1)}")
        results[name] = first
        print(f"{name}: {first['fingerprint'][:16]}", flush=True)
        save(document)


if __name__ == "__main__":
    main()
