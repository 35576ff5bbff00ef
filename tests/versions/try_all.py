"""Tests evenstep with each version of torch and Python that it supports: `make versions`.

    python tests/versions/try_all.py                      # hours; needs uv (pip install uv)
    python tests/versions/try_all.py "torch 2.6" --tests none

It writes benchmarks/results/versions.json, in which a partial run replaces only its own rows;
benchmarks/write_docs.py makes docs/versions.md of it. What can't be had is skipped with a line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments import ENVIRONMENTS, FOLDER, ROOT, Environment, MissingError, build_wheel, make

RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
LIMIT_S = 3 * 3600
ALL_TESTS = ["tests"]
TRAIN = ("-m", "evenstep", "train", "--model", "lenet", "--epochs", "1")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PYTEST = ("-m", "pytest", "--dist", "loadgroup", "--max-worker-restart=0", "-m", "not slow")
# This table's page is written again when all rows are there.
STALE = "tests/bench/test_benchmarks.py::test_a_committed_page_is_what_the_committed_files_make"
FACTS = "import json; from evenstep.bench import machine; print(json.dumps(machine.facts()))"
FINGERPRINT = re.compile(r"\b[0-9a-f]{64}\b")


class FailedError(Exception):
    """A check has failed; the message is what the table says."""


class Checks:
    """What is run in one environment; the names of the methods are the columns of the table.

    Each returns what is said where it works: "" or a figure.
    """

    def __init__(self, one: Environment, folder: Path, tests: Sequence[str], workers: int) -> None:
        self._one, self._folder, self._tests, self._workers = one, folder, tests, workers
        self._program = folder / "readme.py"
        self._program.write_text(self._run(ROOT / "benchmarks/readme_program.py"), "utf-8")

    def readme(self) -> str:
        """Run the program of the README; return its fingerprint."""
        return only_one(self._run(self._program))

    def torchrun(self) -> str:
        """Run it in two processes; both must have the fingerprint of one."""
        return only_one(self._run(*TORCHRUN, self._program) + self.readme())

    def train(self) -> str:
        """Train on one device and on two, with a checkpoint."""
        return only_one(self._train("1") + self._train("2", "--checkpoint-dir", self._folder / "c"))

    def compile(self) -> str:
        """Train with compiled shards on one device and on two; say why if they are not compiled."""
        said = self._train("1", "--compile") + self._train("2", "--compile")
        why_not = re.search(r"eagerly, because (.*)", said)
        return (f"eager: {why_not[1]}" if why_not else "") or only_one(said)

    def portable(self) -> str:
        """Train in portable arithmetic on one device and on two."""
        options = ("--arithmetic", "portable")
        return only_one(self._train("1", *options) + self._train("2", *options))

    def verify(self) -> str:
        """Compare 1, 2 and 3 devices."""
        return only_one(self._run("-m", "evenstep", "verify", "--model", "lenet"))

    def export(self) -> str:
        """Export the checkpoint of `train`."""
        out = self._folder / "net.pt2"
        place = ("--checkpoint", self._folder / "c", "--out", out)
        said = self._run("-m", "evenstep", "export", *place)
        return re.search(r"max difference +(\S+)", said)[1]

    def doctor(self) -> str:
        """Return the private names of torch that are missing."""
        facts = json.loads(self._run("-m", "evenstep", "doctor", "--json"))["facts"]
        lacks = facts["torch_lacks"]
        if any(one["needed"] and not one["has_public_way"] for one in lacks):
            raise FailedError(str(lacks))
        return ", ".join(one["path"] for one in lacks)

    def golden(self) -> str:
        """Record the golden runs that this torch and processor have no result of, on all layouts.

        Layouts with different results are an error. Recorded runs are compared by the tests.
        """
        self._run(ROOT / "tests/golden/record.py", "--missing")
        return ""

    def tests(self) -> str:
        """Run the tests; return how many passed. What they print is kept in the environment."""
        if not self._tests:
            return "not run"
        which = "" if self._tests == ALL_TESTS else "quick "
        without = ("--deselect", f"{STALE}[versions]")
        said = self._run(*PYTEST, "-n", self._workers, *without, *self._tests, fails=True)
        (self._one.folder / "tests.txt").write_text(said, "utf-8")
        passed = re.search(r"(\d+) passed", said)
        failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)))
        if failed or not passed:
            raise FailedError(
                f"{len(failed)} failed: {' '.join(failed)}" if failed else said[-300:]
            )
        return f"{passed[1]} {which}tests passed"

    def _train(self, devices: str, *options: object) -> str:
        return self._run(*TRAIN, "--devices", devices, *options, with_log=True)

    def _run(self, *arguments: object, **options: bool) -> str:
        return output_of(self._one, *arguments, **options)


def output_of(
    one: Environment, *arguments: object, fails: bool = False, with_log: bool = False
) -> str:
    """Return what an environment's Python prints, and logs if asked to.

    Args:
        one: the environment.
        *arguments: of its Python.
        fails: whether its failure is no error.
        with_log: whether to return what it logs too.
    """
    done = subprocess.run(
        [str(one.interpreter), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **one.variables, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode != 0 and not fails:
        raise FailedError(" ".join((done.stderr or done.stdout).split())[-300:])
    return done.stdout + (done.stderr if with_log else "")


def only_one(text: str) -> str:
    """Return the only fingerprint in a text."""
    found = set(FINGERPRINT.findall(text))
    if len(found) != 1:
        raise FailedError(f"the fingerprints {' '.join(sorted(found)) or 'are missing'}")
    return found.pop()


def row_of(one: Environment, tests: Sequence[str], workers: int) -> dict[str, Any]:
    """Run the checks in an environment; return its row."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(one, Path(folder), tests, workers)
        for name in (name for name in vars(Checks) if not name.startswith("_")):
            began_s = time.monotonic()
            try:
                result = {"works": True, "said": getattr(checks, name)()}
            except (FailedError, subprocess.TimeoutExpired) as error:
                result = {"works": False, "said": str(error).replace(str(ROOT), "")}
            found[name] = {**result, "seconds": round(time.monotonic() - began_s)}
            print(f"  {name}: {'' if result['works'] else 'FAILS '}{result['said']}", flush=True)
    return {"machine": json.loads(output_of(one, "-c", FACTS)), "checks": found}


def resumed(made: Sequence[Environment]) -> dict[str, Any]:
    """Let each environment resume what every one writes; return by writer, then by reader.

    Each result says whether the resumed training opens with the checkpoint's fingerprint and closes
    with that of the training which went on, and what evenstep logs.
    """
    program = ROOT / "tests/versions/resume.py"
    found: dict[str, Any] = {str(one): {} for one in made}
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(number)) for number in range(len(made))]
        written = [
            json.loads(output_of(one, program, "write", place))
            for one, place in zip(made, places, strict=True)
        ]
        for reader in made:
            lines = output_of(reader, program, "resume", *places).splitlines()
            for writer, before, line in zip(made, written, lines, strict=True):
                after = json.loads(line)
                found[str(writer)][str(reader)] = {
                    "opens alike": after.get("opened") == before["opened"],
                    "closes alike": after.get("closed") == before["closed"],
                    "said": after.get("said", after.get("refused")),
                }
    return found


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of environments; default: all")
    parser.add_argument("--quick", default="", help="the quick tests, separated by spaces")
    parser.add_argument(
        "--tests",
        choices=("planned", "quick", "none"),
        default="planned",
        help="planned: all tests where environments.py says so, the quick ones elsewhere",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    wheel = build_wheel()
    document = load()
    for one in ENVIRONMENTS:
        if options.names and not any(name in str(one) for name in options.names):
            continue
        print(one, flush=True)
        try:
            make(one, wheel)
        except MissingError as error:
            print(f"  skipped: {error}", flush=True)
            continue
        wanted = one.tests if options.tests == "planned" else options.tests
        which = {"all": ALL_TESTS, "quick": options.quick.split(), "none": []}[wanted]
        document["rows"][str(one)] = row_of(one, which, options.workers)
        write(document)
    there = [one for one in ENVIRONMENTS if one.is_made]
    for writer, by_reader in resumed(there).items():
        document["resumed"].setdefault(writer, {}).update(by_reader)
    write(document)
    rows = document["rows"].values()
    return int(not all(check["works"] for row in rows for check in row["checks"].values()))


def load() -> dict[str, Any]:
    """Return the results so far."""
    document = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return {
        "benchmark": "versions",
        "command": "make versions",
        "rows": {},
        "resumed": {},
        **document,
    }


def write(document: dict[str, Any]) -> None:
    """Write the results, in the order of the table."""
    for part in ("rows", "resumed"):
        names = [str(one) for one in ENVIRONMENTS]
        document[part] = {name: document[part][name] for name in names if name in document[part]}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
