"""The training state: what a checkpoint holds, and how it is read back and checked."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from evenstep.checkpoint.codec import Encoded, Plain, Tree
from evenstep.checkpoint.files import read_checkpoint
from evenstep.checkpoint.fingerprint import extra_states, frozen_parameters
from evenstep.checkpoint.optimizer_kind import OptimizerKind
from evenstep.data import Cursor
from evenstep.data.order import LoaderPlace
from evenstep.devices.facts import Facts
from evenstep.errors import CheckpointError, InputError
from evenstep.nn import sliced_layers
from evenstep.options.experiment import LATER, Experiment

Tensors: TypeAlias = dict[str, torch.Tensor]

_SAVED_AS = {"compile": "hybridize"}  # fields that checkpoints have under an earlier name
_UNUSED = {"draws_random"}  # what checkpoints of version 0.1.0 hold besides


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelState:
    """The tensors of a model by name, each once, and what its modules have besides.

    Attributes:
        parameters: all parameters.
        buffers: all buffers, those that a module's `state_dict` leaves out included.
        extra: what `get_extra_state` of modules returned, by their names; None in a checkpoint of
            version 0.1.0, which did not ask for it.
        frozen: the names of the parameters that require no gradient; None in a checkpoint of
            version 0.1.0, which did not hold them.
        slices: how layers are cut into slices, by their names (see `evenstep.nn.slice_`).
    """

    parameters: Tensors
    buffers: Tensors
    extra: dict[str, Any] | None = dataclasses.field(default=None, metadata=LATER)
    frozen: list[str] | None = dataclasses.field(default=None, metadata=LATER)
    slices: dict[str, str] = dataclasses.field(default_factory=dict, metadata=LATER)

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the model's own tensors, not copies."""
        return cls(
            parameters={name: value.detach() for name, value in model.named_parameters()},
            buffers=dict(model.named_buffers()),
            extra=extra_states(model),
            frozen=frozen_parameters(model),
            slices=sliced_layers(model),
        )

    def facts(self) -> Facts:
        """Return what must be the same when training resumes."""
        tensors = {f"parameter {name}": _spell(value) for name, value in self.parameters.items()}
        tensors |= {f"buffer {name}": _spell(value) for name, value in self.buffers.items()}
        found = {"slices": {f"layer {k}": v for k, v in self.slices.items()}}
        if self.extra is not None:
            found["extra"] = {f"extra state of {name}": "some" for name in self.extra}
        if self.frozen is not None:
            found["frozen"] = {f"requires_grad of {name}": "False" for name in self.frozen}
        return {"tensors": tensors, **found}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that training continues from. A checkpoint's keys are the fields' names.

    Attributes:
        experiment: the choices that the result depends on.
        cursor: the place of the next batch in the data.
        within_rounding: whether results are equal to those of other devices within rounding, not
            bit for bit, because devices or processes of different kinds had a part in them.
        seeds_at: the place in the sequence of seeds, where it differs from `cursor`: after an epoch
            in which some batch had no step, or several.
        steps_done: the number of steps since the start of the training.
        compiles: whether shards are compiled; None before the first step.
        model: the model's parameters and buffers.
        optimizer: the optimizer's `state_dict`, and those of optimizers inside it.
        scheduler: the scheduler's `state_dict`; None without one.
        fingerprint: of model and optimizer; empty until it is computed (see `with_fingerprint`).
        optimizers: the kinds of the optimizer and of those inside it, by their places in it; empty
            in a checkpoint of version 0.1.0.
        data: the place in a loader that is not evenstep's; None without one.
        user_state: the states of the objects in `Trainer(state=...)`, by name.
        cut_by_time: the modules that begin stages which were chosen by time (`Stages(
            "balanced:time")`), with the stages' numbers; empty without.
        facts: what the bits depend on besides, by kind and name (see `evenstep.devices.facts`);
            empty in a checkpoint of version 0.1.0, which did not hold it.
        hash_seed: the seed with which Python hashed strings, or "random"; empty in a checkpoint of
            version 0.2.0, which did not hold it.
    """

    experiment: Experiment
    cursor: Cursor
    steps_done: int
    compiles: bool | None
    model: ModelState
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None
    fingerprint: str = ""
    seeds_at: Cursor | None = dataclasses.field(default=None, metadata=LATER)
    optimizers: dict[str, OptimizerKind] = dataclasses.field(default_factory=dict, metadata=LATER)
    within_rounding: bool = dataclasses.field(default=False, metadata=LATER)
    data: LoaderPlace | None = dataclasses.field(default=None, metadata=LATER)
    user_state: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=LATER)
    cut_by_time: dict[str, int] = dataclasses.field(default_factory=dict, metadata=LATER)
    facts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict, metadata=LATER)
    hash_seed: str = dataclasses.field(default="", metadata=LATER)

    def to_tree(self) -> Tree:
        """Return the state as nested dicts; tensors are not copied."""
        return _as_dict(self)

    @classmethod
    def from_tree(cls, tree: Tree, folder: Path) -> TrainingState:
        """Return the state that `to_tree` turned into `tree`.

        Raises:
            CheckpointError: a key is missing or unknown, or a value has a different type; the
                message names the key, and `folder`.
        """
        if not isinstance(tree, dict) or not tree.keys() & typing.get_type_hints(cls).keys():
            raise CheckpointError(
                f"{folder} holds a checkpoint, but not of a trainer: give a folder that "
                f"Trainer.save has written"
            )
        used = {key: value for key, value in tree.items() if key not in _UNUSED}
        state: TrainingState = _read_from(folder, cls, used, "")
        return state

    @property
    def all_facts(self) -> Facts:
        """Everything that is compared when training resumes."""
        given = self.experiment, self.model, self.optimizers, self.hash_seed
        return {**self.facts, **facts_of(*given)}

    def check_fingerprint(self, restored: str) -> None:
        """Make sure that the restored state is the saved one, bit for bit."""
        if restored != self.fingerprint:
            raise CheckpointError(
                f"the restored state has fingerprint {restored[:16]}…, the saved one had "
                f"{self.fingerprint[:16]}…: the model or the optimizer has state that its "
                f"state_dict lacks, so training can't be resumed exactly"
            )


def facts_of(
    experiment: Experiment,
    model: ModelState,
    optimizers: Mapping[str, OptimizerKind],
    hash_seed: str,
) -> Facts:
    """Return the facts that a checkpoint holds as other parts of its state."""
    kinds = [kind.facts(place) for place, kind in optimizers.items()]
    facts = {
        "experiment": dataclasses.asdict(experiment),
        **model.facts(),
        "optimizer": dict(itertools.chain.from_iterable(map(dict.items, kinds))),
    }
    if hash_seed:
        facts["strings"] = {"PYTHONHASHSEED": hash_seed}
    return facts


def read_training_state(folder: Path, without: Collection[int] = ()) -> TrainingState:
    """Read the checkpoint in `folder`, or the newest of several.

    Of the parameters `without`, given by the optimizer's numbers, the optimizer's state is left
    out.

    Raises:
        CheckpointError: it is missing, damaged, or not a trainer's.
    """
    prune = functools.partial(_prune, without) if without else None
    return TrainingState.from_tree(read_checkpoint(folder, prune), folder)


def read_experiment(folder: Path) -> Experiment:
    """Read the experiment alone of the checkpoint in `folder`, or of the newest of several.

    Raises:
        CheckpointError: as for `read_training_state`.
    """
    tree = read_checkpoint(folder, lambda plain: {"experiment": plain["experiment"]})
    experiment: Experiment = _read_from(folder, Experiment, tree["experiment"], "experiment")
    return experiment


def _spell(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _prune(without: Collection[int], plain: Plain) -> Plain:
    optimizer = plain["optimizer"]
    pairs = optimizer["state"].get("$dict", [])
    kept = {"$dict": [[key, value] for key, value in pairs if key not in without]}
    return {**plain, "optimizer": {**optimizer, "state": kept}}


def with_fingerprint(encoded: Encoded, fingerprint: str) -> Encoded:
    """Return an encoded training state with its fingerprint, which takes long to compute."""
    return encoded._replace(plain={**encoded.plain, "fingerprint": fingerprint})


def _names(kind: Any) -> dict[str, str]:
    """Return the fields of a dataclass by their keys in a checkpoint."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {_SAVED_AS.get(name, name): name for name in names}


def _as_dict(value: Any) -> Any:
    if type(value) is dict and all(map(dataclasses.is_dataclass, value.values())):
        return {key: _as_dict(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    names = _names(value).items()
    later = _later_fields(type(value))
    items = {key: _as_dict(getattr(value, name)) for key, name in names}
    return {key: item for key, item in items.items() if key not in later or item != later[key]}


def _later_fields(kind: Any) -> dict[str, object]:
    """Return the fields that a checkpoint has only where they differ from these defaults."""
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(kind)
        if LATER.items() <= field.metadata.items()
    }


def _read_from(folder: Path, kind: Any, value: Any, key: str) -> Any:
    """Return the value of `key` in the checkpoint in `folder` as the annotated type `kind`."""
    try:
        return _read(kind, value, key)
    except InputError as error:
        raise CheckpointError(
            f"the training state in {folder} can't be used: {error}; it is damaged, or a "
            f"different version of evenstep wrote it"
        ) from error


def _read(kind: Any, value: Any, key: str) -> Any:
    """Return the value of `key` as the annotated type `kind`. Raises InputError if it isn't one."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if types.NoneType in choices:
        return value if value is None else _read(choices[0], value, key)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, key)
    if origin is typing.Literal:
        fits = type(value) is str and value in choices
    else:
        fits = type(value) is (origin or kind)
    if not fits:
        plain = isinstance(value, bool | int | float | str | None)
        shown = repr(value) if plain else type(value).__name__
        needed = f"one of {', '.join(choices)}" if origin is typing.Literal else kind.__name__
        raise InputError(f"{key} is {shown}, but {needed} is needed")
    if origin is list:
        return [_read(choices[0], item, f"{key}[{place}]") for place, item in enumerate(value)]
    if origin is dict and choices[1] is not Any:
        return {name: _read(choices[1], item, f"{key}.{name}") for name, item in value.items()}
    return value


def _read_fields(kind: Any, value: Any, key: str) -> Any:
    names, hints, prefix = _names(kind), typing.get_type_hints(kind), f"{key}." if key else ""
    _read(dict, value, key)
    for one in value:
        if one not in names:
            raise InputError(f"it has the unknown key {prefix}{one}")
    for one in names:
        # An experiment without an option was written before the option existed.
        if one not in value and kind is not Experiment and one not in _later_fields(kind):
            raise InputError(f"it lacks the key {prefix}{one}")
    return kind(**{names[k]: _read(hints[names[k]], v, prefix + k) for k, v in value.items()})
