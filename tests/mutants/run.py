"""Plants the faults of `mutants.py` in the working tree, one after another, and runs their tests.

    python tests/mutants/run.py                 # all of them
    python tests/mutants/run.py tree "a shard"  # those whose names contain one of these words

It writes `results.json`, in which a partial run replaces only its own rows. The exit status is 1 if
no test has caught a fault, and 2 if `src` has changes that are not committed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "evenstep"
RESULTS = Path(__file__).with_name("results.json")
LIMIT_S = 150
"""The longest run of a fault's tests: many faults leave something waiting."""

# As `make test` runs them, but with output that is read by line.
PYTEST = (
    *("-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadgroup", "--max-worker-restart=0"),
    *("-m", "not slow", "-p", "no:cacheprovider", "--tb=no", "-r", "fE"),
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", re.MULTILINE)


def main(parts: Sequence[str]) -> int:
    """Run the faults whose names contain one of `parts` (all without any); return the status."""
    if git("status", "--porcelain", "--", "src"):
        print("src has changes that are not committed: commit or remove them first")
        return 2
    chosen = [one for one in MUTANTS if not parts or any(part in one.name for part in parts)]
    if not chosen:
        print("no fault has such a name")
        return 2
    rows = {row["name"]: row for row in saved_rows()}
    for mutant in chosen:
        row = rows[mutant.name] = outcome_of(mutant)
        print(f"{said_of(row)}  {mutant.name}  ({row['seconds']:.0f} s)", flush=True)
        write_results([rows[one.name] for one in MUTANTS if one.name in rows])
    return int(any(not rows[one.name]["caught"] for one in chosen))


def outcome_of(mutant: Mutant) -> dict[str, Any]:
    """Run the tests of a fault while it is planted; return its row of the results."""
    began_s = time.monotonic()
    with planted(mutant):
        status, output = tests_with_limit([f"tests/{test}" for test in mutant.tests])
    failed = _FAILED.search(output)
    by = failed[1] if failed else "a time limit" if status is None else ""
    if status not in (None, 0, 1) and not failed:
        raise RuntimeError(f"the tests of {mutant.name!r} could not be run:\n{output}")
    return {
        "name": mutant.name,
        "kind": mutant.kind,
        "file": mutant.file,
        "caught": bool(by),
        "by": by,
        "seconds": round(time.monotonic() - began_s, 1),
    }


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Inside `with`, the file of the library has the fault."""
    path = SOURCE / mutant.file
    sound = path.read_bytes()
    text = sound.decode()
    assert text.count(mutant.old) == 1, mutant
    try:
        path.write_bytes(text.replace(mutant.old, mutant.new).encode())
        yield
    finally:
        path.write_bytes(sound)


def tests_with_limit(tests: Sequence[str]) -> tuple[int | None, str]:
    """Run tests in a session of their own; return their exit status, None at the limit."""
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *_options_of(tests), *tests],
        cwd=ROOT,
        # Compiled files with a fault could be as new and as long as those without it.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        end_session(process)
        return None, process.communicate()[0]
    except BaseException:
        end_session(process)
        raise
    return process.returncode, output


def _options_of(tests: Sequence[str]) -> list[str]:
    is_of_accelerator = any(test.startswith("tests/accelerator/") for test in tests)
    return ["--accelerator"] * is_of_accelerator


def end_session(process: subprocess.Popen[str]) -> None:
    """Kill the tests and the processes that they have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def saved_rows() -> list[dict[str, Any]]:
    """Return the rows of the last run; none before the first."""
    if not RESULTS.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["mutants"]
    return rows


def write_results(rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows, and the revision that the last faults were planted in."""
    results = {"revision": git("rev-parse", "HEAD"), "mutants": rows}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def said_of(row: dict[str, Any]) -> str:
    """Return what became of a fault, in a word."""
    return "caught  " if row["caught"] else "SURVIVED"


def git(*arguments: str) -> str:
    """Return what a command of git prints."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the file is put back
    sys.exit(main(sys.argv[1:]))
