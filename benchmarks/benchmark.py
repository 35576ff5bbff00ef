"""What a benchmark is: contenders, how they are measured, and the tables of its page."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.bench import Contender, results, running
from evenstep.bench.rounds import Run
from evenstep.bench.tables import Table

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
RESULTS = FOLDER / "results"
sys.path.append(str(ROOT / "tests" / "support"))  # trainings that are disturbed, machines, kinds
TRAINING_STEPS = {
    "lenet": {"warmup_steps": 5, "steps": 176},
    "resnet18": {"warmup_steps": 8, "steps": 5},
}
"""The steps of each network: timed ones for at least 3 s with the fastest contender."""

ALLOCATORS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "keeps": {  # blocks up to 32 MiB come from the heap, and the heap never shrinks
        "MALLOC_MMAP_THRESHOLD_": str(2**25),
        "MALLOC_TRIM_THRESHOLD_": str(2**36),
    },
    "gives_back": {"MALLOC_MMAP_THRESHOLD_": str(2**16)},  # freed blocks of 64 KiB are unmapped
}
"""Settings of glibc's malloc, by its environment variables (mallopt(3)).

By default its thresholds adapt to what the program frees. Depending on the history of the process,
the memory of activations then returns to the system and comes back page by page in every step, or
not. The other two settings are fixed. An open `Trainer` keeps freed memory and overrides them,
unless it was made with `tune_malloc=False`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark."""

    name: str  # name on the command line and of its result file
    contenders: Sequence[Contender]  # what is measured, once per round each
    # returns the tables of a result file, for the page and for the terminal
    tables: Callable[[Mapping[str, Any]], Mapping[str, Table]]
    # settings for the result file
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Callable[[], Mapping[str, Any]] = dict  # returns further fields of the result file
    rounds: int = 5  # number of rounds by default
    # context in which the rounds run
    place: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    # returns what is predicted of contenders before each round, a row each
    predict: Callable[[Sequence[Contender]], Iterable[Run]] = lambda contenders: ()
    # returns the figures of one contender
    measure: Callable[[Contender], Mapping[str, Any]] = running.measure

    def measured(self, document: Mapping[str, Any]) -> Iterator[tuple[Contender, list[Run]]]:
        """Yield each contender that has runs in a result file, and its runs."""
        for one in self.contenders:
            if runs := one.runs(document):
                yield one, runs


def script(
    module: str, key: str, job: Mapping[str, Any], label: str = "", **more: Any
) -> Contender:
    """Return a contender that runs a module of `specs`; its runs are marked with "variant"."""
    more = {"names": {"variant": key}, **more}
    module = f"specs.{module}"
    return Contender(key=key, label=label, module=module, job=job, folder=FOLDER, **more)


def cpus(count: int) -> list[str]:
    """Return the names of CPU devices."""
    return [f"cpu:{number}" for number in range(count)]


def column(runs: Sequence[Run], figure: str) -> list[Any]:
    """Return a figure of each run."""
    return [run[figure] for run in runs]


def load(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the result file of a benchmark; None if there is none."""
    file = folder / f"{name}.json"
    return results.load(file) if file.exists() else None


def command_line(argv: Sequence[str]) -> str:
    """Return a command as typed in the root of the repository, without paths of this machine."""
    return shlex.join(["python", *map(_without_place, argv)])


def _without_place(argument: str) -> str:
    if not argument.startswith("/") and not argument.endswith(".py"):
        return argument
    path = Path(argument).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
