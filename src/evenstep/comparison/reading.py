"""Reads a record: the events of every process, put into steps. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.errors import InputError, shown
from evenstep.files import open_file

_FORMAT, _VERSION = "evenstep record", 2
_MOST_NBYTES = 4 << 30
_MOST_LINE_NBYTES = 256 << 20
_MOST_PROCESSES = 1024


@dataclasses.dataclass(frozen=True)
class Kept:
    """What was kept of a tensor.

    Attributes:
        digest: of its bits; None if its values could not be read.
        rows: of the set of its rows, as a number that adds up over batches; None without examples.
        shape: its shape.
        dtype: its dtype.
        total: the sum of its values; None of integers.
        squares: the sum of their squares.
        largest: the largest absolute value.
        nans: the number of NaN.
        sketch: sums of its values with random signs; None of a tensor that has examples.
        picked: which example was looked at more closely, by its inputs; None without examples.
        sample: some values of it.
    """

    digest: str | None
    rows: int | None
    shape: tuple[int, ...]
    dtype: str
    total: float | None
    squares: float | None
    largest: float | None
    nans: int | None
    sketch: tuple[float, ...] | None = None
    picked: int | None = None
    sample: tuple[float, ...] = ()

    @property
    def elements(self) -> int:
        """The number of values."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclasses.dataclass
class Call:
    """A call of a module.

    Attributes:
        module: its name in the model; "" for the model itself.
        kind: its class.
        trains: whether it was in training mode.
        drew: a digest of the random numbers that were drawn in it; "" for none.
        inputs, outputs: its tensors.
        examples: of the model, and of parts with all its parameters: a digest of each example.
        autocast: of the model itself: the dtype of autocast.
        starts: beside examples: a digest of the set of their first values, which adds up.
    """

    module: str
    kind: str
    trains: bool
    drew: str
    inputs: list[Kept]
    outputs: list[Kept]
    examples: list[str] | None = None
    autocast: str | None = None
    starts: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is a call of a model, and not of a part of one."""
        return not self.module or (self.module.startswith("model ") and ":" not in self.module)


@dataclasses.dataclass
class ProcessStep:
    """What one process did for one update.

    Attributes:
        epoch: the passes over a data loader that had begun.
        calls: the calls of modules that were differentiated, in the order in which they ended.
        losses: the losses that were backpropagated.
        local: the gradients when the last backward pass had made them, by parameter.
        exchanged: the gradients at the end of the last backward pass.
        seen: the gradients that the optimizer saw.
        held: the parameters that the optimizer updates.
        settings: the optimizer's settings, for each group of parameters.
        groups: how many of `held` each group has, in their order.
        optimizer: the number of the optimizer.
        changed: the weights that something else had changed before the step.
        scale: by which a GradScaler had multiplied the losses.
        is_skipped: whether the GradScaler left the update out.
        values: of modules and parameters by name: the first values of outputs and gradients, as
            base64.
        weights, buffers: the values after the update.
        generators: the states of the generators of random numbers after the update.
    """

    epoch: int = 0
    calls: list[Call] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    local: dict[str, Kept] = dataclasses.field(default_factory=dict)
    exchanged: dict[str, Kept] = dataclasses.field(default_factory=dict)
    seen: dict[str, Kept] = dataclasses.field(default_factory=dict)
    held: list[str] = dataclasses.field(default_factory=list)
    settings: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    groups: list[int] = dataclasses.field(default_factory=list)
    optimizer: int = 0
    changed: dict[str, Kept] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    is_skipped: bool = False
    values: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    weights: dict[str, Kept] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Kept] = dataclasses.field(default_factory=dict)
    generators: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def updates_parts(self) -> bool:
        """Whether the optimizer updates parts of parameters, and other processes the others."""
        return any(name.startswith("part of group ") for name in self.held)

    @property
    def settings_by_parameter(self) -> dict[str, Mapping[str, Any]]:
        """The optimizer's settings for each parameter; none where the groups aren't known."""
        if len(self.groups) != len(self.settings) or sum(self.groups) != len(self.held):
            return {}
        pairs = zip(self.settings, self.groups, strict=True)
        every = (settings for settings, count in pairs for _ in range(count))
        return dict(zip(self.held, every, strict=True))

    @property
    def examples(self) -> list[str]:
        """The digests of all examples that reached a model, in their order."""
        return [one for call in self.calls if call.is_whole for one in call.examples or ()]


@dataclasses.dataclass
class Process:
    """One process of a run.

    Attributes:
        rank: its number.
        command: its command line.
        launched: the command line that was recorded, with its launcher; empty of a part of a
            script.
        facts: how it computes.
        weights, buffers: the values at the first call of the model.
        frozen: the parameters that want no gradient.
        settings: what modules say of their settings, by name.
        loaders: what each pass over a data loader said of it.
        steps: one for each recorded update.
        most_steps: how many updates of each optimizer were to be recorded, at most.
        is_whole: whether the record has an end: it was neither killed nor full.
    """

    rank: int
    command: list[str]
    launched: list[str]
    facts: dict[str, str]
    weights: dict[str, Kept] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Kept] = dataclasses.field(default_factory=dict)
    frozen: list[str] = dataclasses.field(default_factory=list)
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    loaders: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    steps: list[ProcessStep] = dataclasses.field(default_factory=list)
    most_steps: int = 0
    is_whole: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        name: the path of the record.
        processes: one for each process, by their numbers.
    """

    name: str
    processes: list[Process]

    @property
    def steps(self) -> int:
        """The number of updates that all processes have recorded."""
        return min(len(process.steps) for process in self.processes)

    def step(self, number: int) -> list[ProcessStep]:
        """Return what each process did for an update."""
        return [process.steps[number] for process in self.processes]

    def seen(self, number: int) -> dict[str, Kept]:
        """Return the gradients that optimizers saw, each in the first process that updates it.

        Of those that are divided over processes, nothing is known.
        """
        if any(step.updates_parts for step in self.step(number)):
            return {}
        return _by_owner(self.step(number), [step.seen for step in self.step(number)])

    def weights(self, number: int) -> dict[str, Kept]:
        """Return the weights after an update, each from the first process that updates it.

        Those that are divided over processes are whole when the next step begins.
        """
        first = self.processes[0].steps
        if first[number].updates_parts:
            exchanged = [step.changed for step in first[number + 1 : number + 2]]
            return first[number].weights | exchanged[0] if exchanged else {}
        return _by_owner(self.step(number), [step.weights for step in self.step(number)])


def _by_owner(steps: Sequence[ProcessStep], found: Sequence[dict[str, Kept]]) -> dict[str, Kept]:
    owned = [
        {name: one[name] for name in step.seen if name in one}
        for step, one in zip(steps, found, strict=True)
    ]
    return dict(ChainMap(*owned, found[0]))


def read_run(folder: Path) -> Run:
    """Return a recorded run.

    Raises:
        InputError: there is no record, or a file is none, damaged, too large, or of a different
            version. A last line that was cut off is left out.
    """
    files = sorted(folder.glob("process-*.jsonl")) if os.path.isdir(folder) else []
    if not files:
        raise InputError(f"{folder} is no record: give a folder that `evenstep record` has written")
    if len(files) > _MOST_PROCESSES:
        raise InputError(
            f"{folder} has {len(files)} processes: at most {_MOST_PROCESSES} can be read"
        )
    processes = sorted((_read_process(file) for file in files), key=lambda one: one.rank)
    if not any(process.steps for process in processes):
        raise InputError(
            f"{folder} holds no update of an optimizer of torch.optim, so nothing in it can be "
            f"compared: record a run that makes one"
        )
    return Run(str(folder), [process for process in processes if process.steps])


def _read_process(path: Path) -> Process:
    try:
        return _process_of(_events(path))
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror or error})") from error
    except (
        *(ValueError, TypeError, KeyError, IndexError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with open_file(path) as file:
        if path.stat().st_size > _MOST_NBYTES:
            raise InputError(f"{path} has more than {_MOST_NBYTES >> 30} GiB: record fewer steps")
        while line := file.readline(_MOST_LINE_NBYTES):
            if not line.endswith(b"\n"):
                if len(line) == _MOST_LINE_NBYTES:
                    raise InputError(
                        f"{path} has a line of more than {_MOST_LINE_NBYTES >> 20} MiB"
                    )
                return  # it was being written when the process ended
            event = json.loads(line)
            if not isinstance(event, dict):
                raise InputError(f"{path} has a line that is no event")
            yield event


def _process_of(events: Iterator[dict[str, Any]]) -> Process:
    header = next(events, {})
    if header.get(_FORMAT) != _VERSION:
        found = header.get(_FORMAT, "no version")
        raise ValueError(f"its header has {found!r} where a record of version {_VERSION} is read")
    command, launched = ([*map(str, header[name])] for name in ("command", "launched"))
    process = Process(int(header["rank"]), command, launched, dict(header["facts"]))
    process.most_steps = int(header.get("steps", 0))
    step, epochs = ProcessStep(), 0
    for event in events:
        what = event["what"]
        if what == "epoch":
            epochs += 1
            step.epoch = epochs
            process.loaders.append({key: value for key, value in event.items() if key != "what"})
        elif what == "model":
            process.weights = _kept_by_name(event["weights"]) | process.weights
            process.buffers = _kept_by_name(event["buffers"]) | process.buffers
            process.frozen += event["frozen"]
            process.settings |= {str(name): str(text) for name, text in event["settings"].items()}
            if event["compiled"]:
                process.facts["torch.compile"] = "used"
        elif what == "changed":
            step.changed |= _kept_by_name(event["weights"])
        elif what == "call":
            if event["grad"]:
                step.calls.append(_call_of(event))
                step.values.setdefault(str(event["module"]), []).extend(event.get("values", ()))
        elif what == "gradient":
            step.local[str(event["name"])] = _kept(event["kept"])
            step.values.setdefault(str(event["name"]), []).append(event.get("values", ""))
        elif what == "backward":
            step.losses += [float(loss) for loss in event["losses"]]
            for gradients in event["gradients"]:
                step.exchanged |= _kept_by_name(gradients)
        elif what == "scale":
            step.scale = float(event["scale"])
        elif what == "before update":
            step.seen |= _kept_by_name(event["gradients"])
            step.held += map(_text, event["parameters"])
            step.settings += event["settings"]
            step.groups += map(int, event.get("groups", ()))
        elif what == "update":
            step.optimizer, step.is_skipped = int(event["optimizer"]), bool(event.get("skipped"))
            for weights in event["weights"]:
                step.weights |= _kept_by_name(weights)
            for buffers in event["buffers"]:
                step.buffers |= _kept_by_name(buffers)
            step.generators = dict(event["generators"])
            process.steps.append(step)
            step = ProcessStep(epoch=epochs)
        elif what == "end":
            process.is_whole = True
    return process


def _call_of(event: Mapping[str, Any]) -> Call:
    outputs = [*map(_kept, event["outputs"])]
    if "picked" in event:
        picked = int(event["picked"])
        outputs = [
            dataclasses.replace(one, picked=picked, sample=tuple(map(float, sample)))
            for one, sample in zip(outputs, event["samples"], strict=True)
        ]
    return Call(
        str(event["module"]),
        str(event["kind"]),
        bool(event["trains"]),
        str(event["drew"] or ""),
        [*map(_kept, event["inputs"])],
        outputs,
        [*map(str, event["examples"])] if "examples" in event else None,
        event.get("autocast"),
        int(event.get("starts", "0"), 16),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {shown(value)} where a name is needed")
    return value


def _kept_by_name(found: Mapping[str, Any]) -> dict[str, Kept]:
    return {str(name): _kept(value) for name, value in found.items()}


def _kept(value: list[Any]) -> Kept:
    digest, rows, shape, dtype, total, squares, largest, nans, sketch = value
    return Kept(
        digest,
        None if rows is None else int(rows, 16),
        tuple(map(int, shape)),
        str(dtype),
        None if total is None else float(total),
        None if squares is None else float(squares),
        None if largest is None else float(largest),
        None if nans is None else int(nans),
        None if sketch is None else tuple(map(float, sketch)),
    )
