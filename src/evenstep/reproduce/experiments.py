"""Builds the experiments of the book from their description in `experiments.json`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.bench import Contender, results, running
from evenstep.errors import counted
from evenstep.reproduce import rows
from evenstep.reproduce.plan import Experiment, Part, Size, Workplace
from evenstep.reproduce.splits.rows import rows as split_rows
from evenstep.reproduce.training import Training, first_steps, train

Description = Mapping[str, Any]
Jobs = Mapping[str, Mapping[str, Any]]
"""The fields of the jobs, by experiment."""


@functools.cache
def descriptions() -> Mapping[str, Description]:
    """Return the content of `experiments.json`: each experiment, in the order of the book."""
    return results.load(Path(__file__).with_name("experiments.json"))


def jobs(size: Size) -> Jobs:
    """Return the jobs as the book has them, or as large as needed to show the same effects."""
    found = (description.get("jobs", {}) for description in descriptions().values())
    return {name: job[size] for one in found for name, job in one.items()}


def measurements(name: str, jobs: Jobs) -> list[Contender]:
    """Return every measurement of an experiment in fresh processes.

    A key consists of a job and its choices, such as "waiting.add.engine.each".
    """
    found = []
    for key, job in descriptions()[name]["jobs"].items():
        module, measure = job["measure"].split(":")
        choices = job.get("choices", {})
        for values in itertools.product(*choices.values()):
            full_key = ".".join([key, *map(str, values)])
            fields = {"measure": measure, **jobs[key], **dict(zip(choices, values, strict=True))}
            module_name = f"evenstep.reproduce.{module}"
            names = {"key": full_key}
            found.append(Contender(key=full_key, module=module_name, job=fields, names=names))
    return found


def experiments(size: Size) -> list[Experiment]:
    """Return the experiments as the book has them, or shortened to a few minutes in total."""
    return [_experiment(name, one, size) for name, one in descriptions().items()]


def _experiment(name: str, description: Description, size: Size) -> Experiment:
    has_trainings = "trainings" in description
    if has_trainings:
        steps = description.get("first_steps", {}).get("steps", {}).get(size, 0)
        words = {"caveat": rows.CAVEATS[size], "steps": counted(steps, "step")}
        parts = _trainings(name, description, size)
        table = functools.partial(rows.trained, description["rows"], size, words)
    else:
        parts = _fresh_processes(name, description, size)
        table = functools.partial(rows.measured, description.get("findings", {}))
        if name == "splits":
            table = functools.partial(split_rows, jobs(size)[name])
    return Experiment(
        name=name,
        **{field: description[field] for field in ("title", "section", "question", "lesson")},
        parts=parts,
        rows=table,
        pictures=tuple(description.get("pictures", ())),
        optional=tuple(description.get("optional", ())),
        needs_data=has_trainings,
    )


def _fresh_processes(name: str, description: Description, size: Size) -> list[Part]:
    """Return parts that are measured in fresh processes, in rounds unless the job has its own."""
    found = measurements(name, jobs(size))
    if "label" in description:
        (one,) = found
        measure = functools.partial(_run, one, {})
        return [Part(key=one.key, label=description["label"], measure=measure)]
    rounds = 1 if size == "quick" else 3
    return [
        Part(
            key=f"{one.key}.round{number}",
            label=f"{one.key}, round {number + 1} of {rounds}",
            measure=functools.partial(_run, one, {"round": number, **one.marks}),
        )
        for number in range(rounds)
        for one in found
        if not (size == "quick" and one.job.get("contender") == "bare")
    ]


def _run(contender: Contender, marks: Mapping[str, Any], place: Workplace) -> Mapping[str, Any]:
    return {**marks, **running.measure(contender)}


def _trainings(name: str, description: Description, size: Size) -> Sequence[Part]:
    trainings = {key: Training(**one) for key, one in description["trainings"].items()}
    if size == "quick":
        trainings = {key: _shortened(one, description["quick"]) for key, one in trainings.items()}
    parts = []
    if first := description.get("first_steps"):
        steps = first["steps"][size]
        for devices in first["devices"]:
            training = dataclasses.replace(trainings[first["part"]], devices=devices)
            label = f"the first {counted(steps, 'step')} on {counted(devices, 'device')}"
            measure = functools.partial(_first, training, steps)
            parts.append(Part(key=f"{name}.first.{devices}", label=label, measure=measure))
    for key, one in trainings.items():
        label = f"{key} (batch {one.batch_size}, {counted(one.devices, 'device')})"
        parts.append(Part(key=key, label=label, measure=functools.partial(_train, key, one)))
    return parts


def _train(key: str, training: Training, place: Workplace) -> Mapping[str, object]:
    found = train(training, place.data(), place.folder / key, place.say)
    return {**found, "training": dataclasses.asdict(training)}


def _first(training: Training, steps: int, place: Workplace) -> Mapping[str, object]:
    return first_steps(training, place.data(), steps)


def _shortened(training: Training, quick: Mapping[str, Any]) -> Training:
    warmup_epochs = min(training.warmup_epochs, quick["epochs"] - 1)
    return dataclasses.replace(training, **quick, warmup_epochs=warmup_epochs)
