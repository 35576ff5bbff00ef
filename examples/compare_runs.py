"""Check that two trainings (`evenstep train --json`) gave the same weights, and learned.

    python examples/compare_runs.py one.json two.json

The exit status is 0 only if the fingerprints are equal and each training reached a test accuracy of
0.95.
"""

import json
import sys
from pathlib import Path

ENOUGH = 0.95


def main(paths: list[str]) -> int:
    """Compare the results in the JSON files `paths` and return the exit status."""
    runs = [json.loads(Path(path).read_text()) for path in paths]
    for run in runs:
        print(
            f"{len(run['devices'])} device(s): test accuracy {run['test_accuracy']:.4f}, "
            f"{run['examples_per_second']:,.0f} examples/s, fingerprint {run['fingerprint'][:16]}…"
        )
    same = len({run["fingerprint"] for run in runs}) == 1
    learned = all(run["test_accuracy"] >= ENOUGH for run in runs)
    print("the same weights, bit for bit" if same else "NOT the same weights")
    if not learned:
        print(f"a training did not reach a test accuracy of {ENOUGH}")
    return 0 if same and learned else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
