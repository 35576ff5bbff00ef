"""Values that were kept on request: which of them differ between two runs."""

from __future__ import annotations

import base64
import binascii

import numpy as np

from evenstep.comparison.reading import Kept, ProcessStep, Run
from evenstep.errors import counted

_TYPES = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "int64": np.int64,
    "int32": np.int32, "int16": np.int16, "int8": np.int8, "uint8": np.uint8, "bool": np.bool_,
}  # fmt: skip


def spell_values(ours: Run, theirs: Run, number: int, place: str) -> tuple[str, ...]:
    """Return how many values at a place, a module or parameter, differ in an update, and the first.

    There is no line if values were not kept in both runs, or do not belong together.
    """
    mine, its = (_values_at(run.step(number), place) for run in (ours, theirs))
    if mine is None or its is None or mine.shape != its.shape:
        return ()
    differ = np.flatnonzero(~((mine == its) | ((mine != mine) & (its != its))))
    if not len(differ):
        return ()
    first = int(differ[0])
    return (
        f"{len(differ)} of the {counted(len(mine), 'value')} that were kept of it differ, the "
        f"first at {first}: {mine[first]!r} in {ours.name}, {its[first]!r} in {theirs.name}",
    )


def _values_at(steps: list[ProcessStep], place: str) -> np.ndarray | None:
    """Return the values of all processes, one after another, as Python would print them."""
    found = []
    for step in steps:
        kept = _kept_at(step, place)
        for coded, one in zip(step.values.get(place, ()), kept, strict=False):
            values = _decoded(coded, one.dtype)
            if values is None:
                return None
            found.append(values)
    return np.concatenate(found) if found else None


def _kept_at(step: ProcessStep, place: str) -> list[Kept]:
    if place in step.local:
        return [step.local[place]] * len(step.values.get(place, ()))
    return [one for call in step.calls if call.module == place for one in call.outputs]


def _decoded(coded: str, dtype: str) -> np.ndarray | None:
    try:
        content = base64.b64decode(coded, validate=True)
    except (binascii.Error, TypeError, ValueError):
        return None
    if dtype == "bfloat16" and len(content) % 2 == 0:
        words = np.frombuffer(content, np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).astype(object)
    if dtype not in _TYPES or not content or len(content) % np.dtype(_TYPES[dtype]).itemsize:
        return None
    return np.array([one.item() for one in np.frombuffer(content, _TYPES[dtype])], dtype=object)
