"""Tables of what `make versions` found, and of the golden runs of each version of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark import ROOT
from evenstep.bench.tables import NOTHING, Table

GOLDEN: Mapping[str, Mapping[str, Any]] = json.loads(
    (ROOT / "tests" / "golden" / "golden.json").read_text("utf-8")
)
BASE = [2, 13, 0]
RUNS = max(map(len, GOLDEN.values()))
CHECKS = (
    *("readme", "torchrun", "train", "compile", "portable", "verify", "export", "doctor"),
    *("golden", "tests"),
)
HEADS = {"readme": "README"}


def checks(document: Mapping[str, Any]) -> Table:
    """Return what works where."""
    rows = []
    for environment, row in document["rows"].items():
        found = [row["checks"].get(name) for name in CHECKS]
        rows.append([environment, *map(_cell, CHECKS, found), row["machine"]["git_revision"]])
    return Table(("", *(HEADS.get(name, name) for name in CHECKS), "revision"), rows)


def _cell(name: str, found: Mapping[str, Any] | None) -> str:
    if found is None or found["said"] == "not run":
        return NOTHING
    if not found["works"]:
        return "**fails**"
    if name == "compile" and found["said"].startswith("eager"):
        return "eager"
    return found["said"].removesuffix(" tests passed") if name == "tests" else "yes"


def details(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each check that fails, and for each private name that is missing."""
    for environment, row in document["rows"].items():
        for name, found in row["checks"].items():
            if not found["works"]:
                yield f"* {environment}, {name}: `{found['said']}`"
            elif name == "doctor" and found["said"]:
                yield f"* {environment} lacks `{found['said']}`: a public way is taken instead."


def same_bits() -> Table:
    """Return how many golden runs have the same bits in each version as in the one before."""
    rows = []
    for vectors in sorted({key.split(", ")[1] for key in GOLDEN}):
        keys = sorted((key for key in GOLDEN if f", {vectors}, " in key), key=_release)
        base = [key for key in keys if _release(key) == BASE]
        for key in keys:
            older = [one for one in keys if _release(one) < _release(key)]
            before = [one for one in older if _release(one) == _release(older[-1])]
            version, _, digest = key.split(", ")
            among = (_alike(key, before), _alike(key, [one for one in base if one != key]))
            rows.append([version.removeprefix("torch "), vectors, f"`{digest}`", *among])
    heads = ("torch", "vectors", "rounding of small layers", "as the version before", "as 2.13.0")
    return Table(heads, rows, 3)


def _release(key: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", key)[:3])]


def _result(key: str, run: str) -> Any:
    found = GOLDEN[key].get(run)
    return GOLDEN[found][run] if isinstance(found, str) else found


def _alike(key: str, others: Sequence[str]) -> str:
    """Return in how many runs an environment has the bits of the most similar of others."""
    counts = []
    for other in others:
        runs = GOLDEN[key].keys() & GOLDEN[other].keys()
        same = sum(_result(key, run) == _result(other, run) for run in runs)
        counts.append((same, f"{same} of {len(runs)}"))
    return max(counts)[1] if counts else NOTHING


def portable(document: Mapping[str, Any]) -> str:
    """Say which fingerprints portable arithmetic gives."""
    found: dict[str, list[str]] = {}
    for environment, row in document["rows"].items():
        check = row["checks"].get("portable")
        if check and check["works"]:
            found.setdefault(check["said"], []).append(environment.partition(",")[0])
    some = (f"{', '.join(dict.fromkeys(names))} give `{one[:16]}`" for one, names in found.items())
    return f"LeNet's training has these fingerprints: {'; '.join(some)}."


def _pairs(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        found
        for writer, by_reader in document["resumed"].items()
        for reader, found in by_reader.items()
        if writer != reader
    ]


def pairs(document: Mapping[str, Any]) -> int:
    """Return the number of pairs of different environments.

    Raises:
        ValueError: the page would be wrong: a training did not begin where the checkpoint ended.
    """
    found = _pairs(document)
    if not all(one["opens alike"] for one in found):
        raise ValueError("a checkpoint is resumed with a different state: mend that first")
    return len(found)


def alike(document: Mapping[str, Any]) -> int:
    """Return in how many of them the last fingerprint is the same.

    Raises:
        ValueError: the page would be wrong: a difference was not said.
    """
    found = _pairs(document)
    if not all(one["closes alike"] or one["said"] for one in found):
        raise ValueError("a resume gives different bits without a word: mend that first")
    return sum(one["closes alike"] for one in found)
