"""The training state: what a checkpoint holds, checked when it is read, and restored exactly."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from evenstep.checkpoint.codec import Encoded, Plain, Tree
from evenstep.checkpoint.files import read_checkpoint
from evenstep.checkpoint.fingerprint import extra_states, frozen_parameters, tree_digest
from evenstep.checkpoint.optimizer_kind import OptimizerKind, refuse_another_optimizer
from evenstep.data import Cursor
from evenstep.data.order import LoaderPlace
from evenstep.errors import CheckpointError, InputError
from evenstep.experiment import LATER, Experiment
from evenstep.nn import sliced_layers
from evenstep.replicas import inner_optimizers

Tensors: TypeAlias = dict[str, torch.Tensor]
Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler

_INNER = "inner_optimizers"  # the key of their states, beside those of the optimizer's state_dict

_SAVED_AS = {"compile": "hybridize"}  # fields that checkpoints have under an earlier name
_UNUSED = {"draws_random"}  # what checkpoints of version 0.1.0 hold besides

# What libraries raise for a state of another kind than they expect.
_UNFIT = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


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

    def to_tree(self) -> Tree:
        """Return the state as nested dicts; tensors are not copied."""
        return _as_dict(self)

    @classmethod
    def from_tree(cls, tree: Tree, folder: Path) -> TrainingState:
        """Return the state that `to_tree` turned into `tree`.

        Raises:
            CheckpointError: a key is missing or unknown, or a value has another type; the message
                names the key, and `folder`.
        """
        if not isinstance(tree, dict) or not tree.keys() & typing.get_type_hints(cls).keys():
            raise CheckpointError(
                f"{folder} holds a checkpoint, but not of a trainer: give a folder that "
                f"Trainer.save has written"
            )
        try:
            used = {key: value for key, value in tree.items() if key not in _UNUSED}
            state: TrainingState = _read(cls, used, "")
        except InputError as error:
            raise CheckpointError(
                f"the training state in {folder} can't be used: {error}; it is damaged, or another "
                f"version of evenstep wrote it"
            ) from error
        return state

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None
    ) -> None:
        """Write the state into a model, an optimizer and a scheduler.

        Raises:
            CheckpointError: one of them is of another kind than the saved one.
        """
        refuse_another_optimizer(self.optimizers, optimizer)
        _refuse_otherwise_frozen(model, self.model)
        _refuse_otherwise_sliced(model, self.model)
        settings = [group.keys() for group in optimizer.param_groups]
        restore_model(model, self.model)
        restore_optimizer(optimizer, self.optimizer)
        if not self.optimizers:
            _refuse_lost_settings(optimizer, settings)
        _follow_layouts(model, optimizer, self.model)
        restore_scheduler(scheduler, self.scheduler)

    @contextmanager
    def unchanged_on_error(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None
    ) -> Iterator[None]:
        """Put back everything that `restore` writes if the block fails."""
        saved = self.model.extra or {}
        extra = {name: state for name, state in extra_states(model).items() if name in saved}
        extra = copy.deepcopy(extra)
        schedule = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None
        try:
            with rolled_back_on_error([*model.parameters(), *model.buffers()], optimizer):
                yield
        except BaseException:
            restore_scheduler(scheduler, schedule)
            _restore_extra(model, extra)
            raise

    def check_experiment(self, experiment: Experiment) -> None:
        """Refuse to resume with another experiment than the checkpoint's, naming what differs."""
        now, saved = dataclasses.asdict(experiment), dataclasses.asdict(self.experiment)
        differing = [name for name in now if now[name] != saved[name]]
        if differing:
            got = ", ".join(f"{name} {now[name]} instead of {saved[name]}" for name in differing)
            raise CheckpointError(
                f"can't resume with {got}: {', '.join(now)} are part of the experiment; resume "
                f"with those of the checkpoint (devices may differ)"
            )

    def check_fingerprint(self, restored: str) -> None:
        """Make sure that the restored state is the saved one, bit for bit."""
        if restored != self.fingerprint:
            raise CheckpointError(
                f"the restored state has fingerprint {restored[:16]}…, the saved one had "
                f"{self.fingerprint[:16]}…: the model or the optimizer has state that its "
                f"state_dict lacks, so training can't be resumed exactly"
            )


def read_training_state(folder: Path, without: Collection[int] = ()) -> TrainingState:
    """Read the checkpoint in `folder`, or the newest of several.

    Args:
        folder: the checkpoint's folder.
        without: the parameters whose optimizer state is left out, by the optimizer's numbers.

    Raises:
        CheckpointError: it is missing, damaged, or not a trainer's.
    """
    prune = functools.partial(_prune, without) if without else None
    return TrainingState.from_tree(read_checkpoint(folder, prune), folder)


def _prune(without: Collection[int], plain: Plain) -> Plain:
    optimizer = plain["optimizer"]
    pairs = optimizer["state"].get("$dict", [])
    kept = {"$dict": [[key, value] for key, value in pairs if key not in without]}
    return {**plain, "optimizer": {**optimizer, "state": kept}}


def with_fingerprint(encoded: Encoded, fingerprint: str) -> Encoded:
    """Return an encoded training state with its fingerprint, which takes long to compute."""
    return encoded._replace(plain={**encoded.plain, "fingerprint": fingerprint})


def restore_model(model: nn.Module, saved: ModelState) -> None:
    """Write saved parameters and buffers into `model`, in place.

    Raises:
        CheckpointError: names, shapes or dtypes differ; the message names the tensors, and nothing
            is written.
    """
    present = ModelState.of(model)
    differences = _differences(present.parameters, saved.parameters, "parameter")
    differences += _differences(present.buffers, saved.buffers, "buffer")
    if saved.extra is not None:
        differences += _missing(present.extra or {}, saved.extra, "extra state of")
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(differences[:3])}{more}: "
            f"build the model that was trained, or train from the start in a new folder"
        )
    _restore_extra(model, saved.extra or {})
    with torch.no_grad():
        for name, tensor in present.parameters.items():
            tensor.copy_(saved.parameters[name])
        for name, tensor in present.buffers.items():
            tensor.copy_(saved.buffers[name])


def _refuse_otherwise_sliced(model: nn.Module, saved: ModelState) -> None:
    """Refuse a model whose layers are cut into other slices, which round differently.

    Raises:
        CheckpointError: names a layer, and nothing is written.
    """
    now, then = sliced_layers(model), saved.slices
    for name in [*then, *now]:
        is_cut, was_cut = now.get(name, "no slices"), then.get(name, "no slices")
        if is_cut != was_cut:
            raise CheckpointError(
                f"can't resume with {is_cut} of the layer {name} instead of {was_cut}: slices are "
                f"part of the experiment; call evenstep.nn.slice_ as before"
            )


def _refuse_otherwise_frozen(model: nn.Module, saved: ModelState) -> None:
    """Refuse a model in which other parameters are frozen: they decide what the next steps train.

    Raises:
        CheckpointError: names the parameters, and nothing is written.
    """
    if saved.frozen is None:
        return
    now, then = frozen_parameters(model), saved.frozen
    thawed, frozen = (
        [one for one in then if one not in now],
        [one for one in now if one not in then],
    )
    known = [one for one in frozen if one in saved.parameters]  # others are of another model
    if thawed or known:
        names, calls, was = (
            (thawed, "requires_grad_(False)", "frozen")
            if thawed
            else (known, "requires_grad_(True)", "not frozen")
        )
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(
            f"{', '.join(names[:3])}{more} was {was} when the checkpoint was saved: call {calls} "
            f"of the model's parameters as before, and change it after Trainer.load"
        )


def _restore_extra(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give modules their extra state back, and make sure that they took it."""
    for name, state in saved.items():
        module, problem = model.get_submodule(name), ""
        if tree_digest(module.get_extra_state()) == tree_digest(state):
            continue
        try:
            module.set_extra_state(copy.deepcopy(state))
        except Exception as error:
            problem = f" ({error!r})"
        if problem or tree_digest(module.get_extra_state()) != tree_digest(state):
            raise CheckpointError(
                f"layer {name} of type {type(module).__name__} did not take its extra state back"
                f"{problem}: its set_extra_state must accept what its get_extra_state returned"
            )


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer, and of those inside it with states of their own."""
    state: dict[str, Any] = optimizer.state_dict()
    inner = {place: one.state_dict() for place, one in inner_optimizers(optimizer).items()}
    return {**state, _INNER: inner} if inner else state


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Tree) -> None:
    """Restore what `optimizer_state` returned.

    Raises:
        CheckpointError: it is of another optimizer.
    """
    inner = inner_optimizers(optimizer)
    states = saved.get(_INNER, {})
    if inner.keys() != states.keys():
        raise CheckpointError(
            f"the checkpoint is of another optimizer than {type(optimizer).__name__}: the saved "
            f"one has {len(states)} optimizers inside it, this one has {len(inner)}"
        )
    shared = [one for one in inner.values() if one.param_groups is optimizer.param_groups]
    _restore_one(optimizer, {key: value for key, value in saved.items() if key != _INNER})
    for place, one in inner.items():
        _restore_one(one, states[place])
    for one in shared:
        one.param_groups = optimizer.param_groups


def _restore_one(optimizer: torch.optim.Optimizer, saved: Tree) -> None:
    """Restore an optimizer's state with the dtypes and memory layouts with which it was saved.

    `load_state_dict` casts state to the dtype of its parameter; this undoes the cast.
    """
    try:
        optimizer.load_state_dict(saved)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in saved["state"].get(number, {}).items():
                loaded = optimizer.state[parameter].get(key)
                if not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                    continue
                if loaded.dtype != value.dtype or loaded.stride() != value.stride():
                    optimizer.state[parameter][key] = value.to(loaded.device, copy=True)
    except _UNFIT as error:
        raise CheckpointError(
            f"the checkpoint is of another optimizer than {type(optimizer).__name__} with "
            f"{len(optimizer.param_groups)} parameter groups: {error!r}"
        ) from error


def _refuse_lost_settings(
    optimizer: torch.optim.Optimizer, before: Iterable[Iterable[str]]
) -> None:
    """Refuse groups that lack settings which they had before they were restored."""
    for group, names in zip(optimizer.param_groups, before, strict=True):
        lost = [name for name in names if name not in group]
        if lost:
            raise CheckpointError(
                f"the checkpoint is of another optimizer than {type(optimizer).__name__}: the "
                f"saved parameter groups have no {', '.join(lost)}"
            )


def _follow_layouts(model: nn.Module, optimizer: torch.optim.Optimizer, saved: ModelState) -> None:
    """Lay state out like its parameter where it was so when it was saved.

    Checkpoints of version 0.1.0 hold convolution weights channels-last, whatever the user's are.
    """
    for name, parameter in model.named_parameters():
        before = saved.parameters[name].stride()
        if before == parameter.stride() or parameter not in optimizer.state:
            continue
        layout = parameter.shape, before
        state = optimizer.state[parameter]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and (value.shape, value.stride()) == layout:
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def restore_scheduler(scheduler: Scheduler | None, saved: Tree | None) -> None:
    """Restore a scheduler's state; a checkpoint with one needs one, and vice versa."""
    if (scheduler is None) != (saved is None):
        was, needed = ("without", "none") if saved is None else ("with", "scheduler=...")
        raise CheckpointError(
            f"the checkpoint was saved {was} a learning-rate scheduler: give Trainer.load {needed}"
        )
    if scheduler is not None and saved is not None:
        try:
            scheduler.load_state_dict(saved)
        except _UNFIT as error:
            raise CheckpointError(
                f"the checkpoint is of another scheduler than {type(scheduler).__name__}: {error!r}"
            ) from error


@contextmanager
def rolled_back_on_error(
    tensors: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """Restore tensors and optimizer state if the block fails, possibly after half its work."""
    tensors = [tensor.detach() for tensor in tensors]
    before = [tensor.clone() for tensor in tensors]
    saved = copy.deepcopy(optimizer_state(optimizer))
    try:
        yield
    except BaseException:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        restore_optimizer(optimizer, saved)
        raise


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


def _differences(present: Tensors, saved: Mapping[str, torch.Tensor], kind: str) -> list[str]:
    other = [
        f"{kind} {name} is {_spell(saved[name])} in the checkpoint, {_spell(tensor)} in the model"
        for name, tensor in present.items()
        if name in saved and _spell(saved[name]) != _spell(tensor)
    ]
    return _missing(present, saved, kind) + other


def _missing(present: Mapping[str, Any], saved: Mapping[str, Any], kind: str) -> list[str]:
    missing = [f"{kind} {name} is not in the checkpoint" for name in present if name not in saved]
    unknown = [f"its {kind} {name} is not in the model" for name in saved if name not in present]
    return missing + unknown


def _spell(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
