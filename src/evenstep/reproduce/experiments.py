"""Builds the experiments of the book from their description in `experiments.json`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.bench import Contender, running
from evenstep.errors import counted
from evenstep.reproduce import rows
from evenstep.reproduce.lineup import (
    descriptions,
    jobs,
    measurements,
    mxnet_measurements,
    split_measurements,
)
from evenstep.reproduce.plan import Experiment, Figures, Part, Row, Size, Workplace
from evenstep.reproduce.splits.rows import rows as split_rows
from evenstep.reproduce.training import Training, first_steps, train

Description = Mapping[str, Any]


def experiments(size: Size) -> list[Experiment]:
    """Return the experiments as the book has them, or shortened to a few minutes in total."""
    return [
        (_with_trainings if "trainings" in description else _with_fresh_processes)(
            name, description, size
        )
        for name, description in descriptions().items()
    ]


def _experiment(
    name: str,
    description: Description,
    parts: Sequence[Part],
    table: Callable[[Figures], list[Row]],
) -> Experiment:
    return Experiment(
        name=name,
        title=description["title"],
        section=description["section"],
        question=description["question"],
        lesson=description["lesson"],
        parts=parts,
        rows=table,
        pictures=tuple(description.get("pictures", ())),
        optional=tuple(description.get("optional", ())),
        needs_data="trainings" in description,
    )


def _with_fresh_processes(name: str, description: Description, size: Size) -> Experiment:
    """Return an experiment that measures in fresh processes: hybridizing, or with the engine."""
    rounds = 1 if size == "quick" else 3
    if name == "hybridize":
        module = "evenstep.reproduce.hybrid_calls"
        calls = Contender(key=name, module=module, job=jobs(size)[name])
        label = "1000 calls of a small network, eager and hybridized"
        parts = [Part(key=name, label=label, measure=functools.partial(_run, calls, {}))]
    else:
        parts = [
            Part(
                key=f"{one.key}.round{number}",
                label=f"{one.key}, round {number + 1} of {rounds}",
                measure=functools.partial(_run, one, {"round": number, **one.marks}),
            )
            for number in range(rounds)
            for one in [
                *measurements(jobs(size)),
                *mxnet_measurements(jobs(size)),
                *split_measurements(jobs(size)),
            ]
            if one.key.split(".")[0] == name
            and not (size == "quick" and one.job.get("contender") == "bare")
        ]
    table = functools.partial(rows.measured, description["findings"])
    if name == "splits":
        table = functools.partial(split_rows, jobs(size)[name])
    return _experiment(name, description, parts, table)


def _run(contender: Contender, marks: Mapping[str, Any], place: Workplace) -> Mapping[str, Any]:
    return {**marks, **running.measure(contender)}


def _with_trainings(name: str, description: Description, size: Size) -> Experiment:
    trainings = {key: Training(**one) for key, one in description["trainings"].items()}
    if size == "quick":
        trainings = {key: _shortened(one, description) for key, one in trainings.items()}
    parts, words = [], {"caveat": rows.CAVEATS[size]}
    if first := description.get("first_steps"):
        steps = first["steps"][size]
        words["steps"] = counted(steps, "step")
        for devices in first["devices"]:
            training = dataclasses.replace(trainings[first["part"]], devices=devices)
            label = f"the first {words['steps']} on {counted(devices, 'device')}"
            measure = functools.partial(_first, training, steps)
            parts.append(Part(key=f"{name}.first.{devices}", label=label, measure=measure))
    parts += [
        Part(
            key=key,
            label=f"{key} (batch {one.batch_size}, {counted(one.devices, 'device')})",
            measure=functools.partial(_train, key, one),
        )
        for key, one in trainings.items()
    ]
    table = functools.partial(rows.trained, description["rows"], size, words)
    return _experiment(name, description, parts, table)


def _train(key: str, training: Training, place: Workplace) -> Mapping[str, object]:
    found = train(training, place.data(), place.folder / key, place.say)
    return {**found, "training": dataclasses.asdict(training)}


def _first(training: Training, steps: int, place: Workplace) -> Mapping[str, object]:
    return first_steps(training, place.data(), steps)


def _shortened(training: Training, description: Description) -> Training:
    quick = description["quick"]
    warmup_epochs = min(training.warmup_epochs, quick["epochs"] - 1)
    return dataclasses.replace(training, **quick, warmup_epochs=warmup_epochs)
