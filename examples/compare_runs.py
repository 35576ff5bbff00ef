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
    runs = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    for run in runs:
        print(
            f"{len(run['devices'])} device(s): test accuracy {run['test_accuracy']:.4f}, "
            f"{run['examples_per_second']:,.0f} examples/s, fingerprint {run['fingerprint'][:16]}…"
        )
    same = len({run["fingerprint"] for run in runs}) == 1
    learned = all(run["test_accuracy"] >= ENOUGH for run in runs)
    print("the same weights, bit for bit" if same else "NOT the same weights")
    for line in () if same else differing(*(run["facts"] for run in runs)):
        print(f"  {line}")
    if not learned:
        print(f"a training did not reach a test accuracy of {ENOUGH}")
    return 0 if same and learned else 1


def differing(*facts: dict[str, dict[str, object]]) -> list[str]:
    """Return what differs between runs of all that their weights depend on, besides the data."""
    named = [
        {f"{kind}, {name}": value for kind in one for name, value in one[kind].items()}
        for one in facts
    ]
    names = dict.fromkeys(name for one in named for name in one)
    return [
        f"{name}: " + " and ".join(str(one.get(name)) for one in named)
        for name in names
        if any(one.get(name) != named[0].get(name) for one in named)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
