"""Writes down a PyTorch run as it happens, by torch's global hooks; it changes no bit of the run.

What is recorded in an optimizer step: the examples that reach the model, inputs and outputs of its
modules, the losses that are backpropagated, gradients (when a backward pass has made them, at its
end, and when the optimizer sees them), and weights, buffers and settings after the update.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers

from evenstep.batch.rng import is_in_shard
from evenstep.distributed.rendezvous import job_share
from evenstep.errors import InputError, shown
from evenstep.options.checks import check_choice, check_integer
from evenstep.private_torch.modules import is_compiled
from evenstep.recording.calls import Calls, Frame
from evenstep.recording.digests import (
    RecentlyKept,
    digest_of_starts,
    digests_of_examples,
    number_in_json,
    sample_of,
    values_of,
)
from evenstep.recording.facts import facts_here, loader_facts, states_of_generators
from evenstep.recording.operators import Operators
from evenstep.recording.own_trainings import drawn_between, draws_here, is_aside, watching_steps
from evenstep.recording.record_file import FORMAT, VERSION, RecordFile
from evenstep.recording.recorded_model import (
    RecordedModel,
    place_of,
    settings_of_modules,
    wrappers_of,
)
from evenstep.recording.updates import Updates, settings_of
from evenstep.recording.watching import (
    arguments_in_order,
    autocast_dtype,
    examples_in,
    is_scripting,
    quiet,
    replaced,
    tensors_in,
)
from evenstep.replicas import original_of

PART = "part of group"
"""How the name of what is no whole parameter begins."""

LEVELS = ("step", "module", "operator")
"""What is kept: of each step only, of each call of a module, too, or of each operator of torch."""


class Recorder:
    """Records this process from `start` on; the file is created at the first call of a model.

    Args:
        folder: as for `record`, and checked, as are level, steps, every, values and batch_dim.
        most_nbytes: the largest file.
        rank: the number of this process, and the number of processes, where `torch.distributed`
            does not say it.
        command: the command line of this process, for the header.
        launched: the command that was recorded, with its launcher; for the header, too.
        environment: variables that may change results, for the header.
    """

    def __init__(
        self,
        folder: Path,
        *,
        level: str = "module",
        steps: int = 100,
        every: int = 1,
        values: Iterable[str] = (),
        batch_dim: int = 0,
        most_nbytes: int = 1 << 30,
        rank: tuple[int, int] = (0, 1),
        command: Iterable[str] = (),
        launched: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._level, self._most_nbytes = folder, level, most_nbytes
        commands = {"command": [*command], "launched": [*launched]}
        self._header = {"level": level, "every": every, "steps": steps, **commands}
        self._rank, self._environment = rank, environment or {}
        self._process = os.getpid()
        self._file: RecordFile | None = None
        self._waiting: list[Mapping[str, Any]] = []  # until the file is there
        self._updates = Updates(steps, every)
        self._values = [*values]
        self._batch_dim = batch_dim
        self._models: list[RecordedModel] = []
        self._numbers = itertools.count()
        self._is_own_step = False
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._calls = Calls()
        self._kept = RecentlyKept()
        self._operators = Operators(self._keep_inputs, self._note_operator)
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()
        self._undo_updates = contextlib.ExitStack()

    def start(self) -> None:
        """Record from now on."""
        for made in (
            hooks_of_modules.register_module_forward_pre_hook(self._before_call),
            hooks_of_modules.register_module_forward_hook(
                self._after_call, with_kwargs=True, always_call=True
            ),
        ):
            self._undo.callback(made.remove)
        for made in (
            hooks_of_optimizers.register_optimizer_step_pre_hook(self._before_update),
            hooks_of_optimizers.register_optimizer_step_post_hook(self._after_update),
        ):
            self._undo_updates.callback(made.remove)
        for owner, name, watched in (
            (torch.Tensor, "backward", self._watched_backward),
            (torch.autograd, "backward", self._watched_backward),
            (torch.amp.GradScaler, "step", self._watched_scaling),
            (torch.utils.data.DataLoader, "__iter__", self._watched_iteration),
        ):
            self._undo.enter_context(replaced(owner, name, watched))
        self._undo.enter_context(watching_steps(self._meet_own_model, self._note_own_loss))

    def stop(self) -> None:
        """Record no more, close the file, and leave nothing behind."""
        self._finish()
        self._undo_updates.close()

    def _finish(self) -> None:
        """Record no more; called while an optimizer goes over its hooks, which it has to keep."""
        with self._lock:
            self._undo.close()
            if self._file is not None and os.getpid() == self._process:  # no fork of it
                self._file.write({"what": "end"})
                self._file.close()

    def _write(self, what: str, **event: Any) -> None:
        """Add an event to the file, once there is one."""
        if self._file is None:
            self._waiting.append({"what": what, **event})
        else:
            self._file.write({"what": what, **event})

    def _open_file(self) -> None:
        rank, world = self._rank
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._file = RecordFile(self._folder, rank, self._most_nbytes)
        header = {FORMAT: VERSION, "rank": rank, "world": world, **self._header}
        self._file.write({**header, "began_s": time.time(), "facts": facts_here(self._environment)})
        for event in self._waiting:
            self._file.write(event)
        self._waiting.clear()

    @property
    def _is_due(self) -> bool:
        """Whether what happens now is recorded: no check, and not in a loader's forked worker."""
        return os.getpid() == self._process and self._updates.is_due and not is_aside()

    # ---- calls of modules and operators

    def _before_call(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # first: the compiler leaves out all that is behind it
            return
        calls, is_due = self._calls, self._is_due and not is_scripting()
        if not calls.frames and is_due:
            has_grad = torch.is_grad_enabled()
            with self._lock, quiet():
                self._meet(module, is_own=is_in_shard())
                if has_grad:
                    self._note_changed_weights()
        examples = examples_in(self._batched(arguments)) if is_due else None
        if examples is None and calls.frames:
            examples = calls.frames[-1].examples
        draws = draws_here() if is_due else None
        is_whole = not calls.frames
        name = "" if is_whole else self._names.get(module, type(module).__name__)
        if is_whole and (model := self._model_of(module)) is not None:
            name = model.name
        kind, number = type(module).__name__, calls.number_of(name)
        calls.enter(Frame(name, kind, module.training, examples, number, draws))
        if is_whole and is_due and self._level == "operator":
            self._operators.__enter__()  # type: ignore[no-untyped-call]

    def _after_call(self, module: nn.Module, arguments: tuple[Any, ...], *rest: Any) -> None:
        """Note a call that has ended; after an exception, torch gives no output."""
        if torch.compiler.is_compiling():
            return
        calls = self._calls
        if not calls.frames:
            return
        frame = calls.frames.pop()
        is_whole = not calls.frames
        if is_whole and frame.draws is not None and self._level == "operator":
            self._operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if len(rest) < 2 or frame.draws is None or is_scripting() or not self._is_due:
            return
        is_core = not is_whole and any(
            frame.module != one.name and one.is_core(original_of(module)) for one in self._models
        )  # what a wrapper holds has the model's name
        if self._level == "step" and not is_whole and not is_core:
            return
        has_grad, autocast = torch.is_grad_enabled(), autocast_dtype()
        with self._lock, quiet():
            inputs = self._batched(arguments_in_order(module, arguments, rest[0]))
            outputs = self._batched(rest[1])
            examples = examples_in(inputs)
            event: dict[str, Any] = {}
            model = self._model_of(module) if is_whole else None
            if model is not None:
                event |= {"model": model.number, "autocast": autocast}
            if examples is not None and (model is not None or is_core):
                event["examples"] = digests_of_examples(inputs, examples)
                event["starts"] = digest_of_starts(inputs, examples)
            if self._wants_values(frame.module):
                event["values"] = [values_of(one) for one in outputs]
            kept = [self._kept.kept_and_picked(one, examples) for one in inputs]
            picked = next((one for _, one in kept if one is not None), None)
            if picked is not None:
                event["picked"] = picked.key
                event["samples"] = [sample_of(one, picked.row, examples) for one in outputs]
            self._write(
                "call",
                module=frame.name,
                kind=frame.kind,
                trains=frame.trains,
                grad=has_grad,
                inputs=[one for one, _ in kept],
                outputs=[self._kept.kept_of(one, examples) for one in outputs],
                drew=drawn_between(frame.draws, draws_here()),
                **event,
            )

    def _batched(self, values: Any) -> list[torch.Tensor]:
        """Return the tensors in nested containers, with the batch as their first dimension."""
        found, dim = tensors_in(values), self._batch_dim
        return [one.detach().movedim(dim, 0) if one.dim() > dim > 0 else one for one in found]

    def _keep_inputs(self, values: Any) -> list[Any]:
        with quiet():
            return [self._kept.kept_of(one, self._examples) for one in self._batched(values)]

    @property
    def _examples(self) -> int | None:
        return self._calls.frames[-1].examples if self._calls.frames else None

    def _note_operator(self, name: str, inputs: list[Any], outputs: Any, drew: bool) -> None:
        calls = self._calls
        frame = calls.frames[-1] if calls.frames else Frame("backward", "", True, None, 0, None)
        number = calls.number_of(frame.name, name)
        has_grad = calls.is_in_backward or torch.is_grad_enabled()
        with self._lock, quiet():
            self._write(
                "call",
                module=f"{frame.name} > {name} {number}".removeprefix(" > "),
                kind=f"operator of {frame.kind}" if frame.kind else "operator",
                trains=frame.trains,
                grad=has_grad,
                inputs=inputs,
                outputs=[self._kept.kept_of(one, self._examples) for one in self._batched(outputs)],
                drew=drew,
            )

    def _meet(self, module: nn.Module, *, is_own: bool = False) -> None:
        """Note a model at its first call, and parameters that it got since.

        Of evenstep's own steps, the gradients that the optimizer sees say it all.
        """
        if not any(True for _ in module.parameters()):
            return
        model = self._model_of(module)
        if model is None:
            if any(one.holds(module) or one.is_wrapped_by(module) for one in self._models):
                return
            if self._file is None:
                self._open_file()
            model = self._new_model(module)
            self._write(
                "model",
                model=model.number,
                kind=type(module).__name__,
                wrapped=wrappers_of(module),
                compiled=any(map(is_compiled, module.modules())),
                settings={
                    model.spell(name): text for name, text in settings_of_modules(module).items()
                },
                weights=model.keep_weights(),
                buffers=self._kept.kept_by_name(model.buffers()),
                frozen=[name for name, one in model.parameters() if not one.requires_grad],
            )
        for name, child in module.named_modules():
            self._names.setdefault(child, model.spell(name))
        for name, parameter in () if is_own else model.parameters():
            is_known = id(parameter) in model.watched
            if parameter.requires_grad and parameter.is_leaf and not is_known:
                model.watched.add(id(parameter))
                noted = functools.partial(self._note_gradient, model.number, name)
                noted.only_reads = True  # type: ignore[attr-defined]
                handle = parameter.register_post_accumulate_grad_hook(noted)
                self._undo.callback(handle.remove)

    def _new_model(self, module: nn.Module) -> RecordedModel:
        """Return a model for a module; what holds a model that is known takes its place."""
        module = original_of(module)
        inside = {id(one) for one in module.modules()}
        known = [one for one in self._models if id(one.module()) in inside]
        number = known[0].number if known else next(self._numbers)
        self._models = [one for one in self._models if one not in known]
        self._models.append(RecordedModel(module, number, self._kept))
        return self._models[-1]

    def _note_changed_weights(self) -> None:
        """Note parameters that something else than an optimizer has changed since the update."""
        for model in self._models:
            changed = model.changed_weights()
            if changed:
                self._write("changed", model=model.number, weights=changed)
                model.keep_weights()

    def _model_of(self, module: nn.Module) -> RecordedModel | None:
        return next((one for one in self._models if one.is_called_by(original_of(module))), None)

    def _wants_values(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._values)

    # ---- gradients

    def _meet_own_model(self, model: nn.Module) -> None:
        """Note the model of evenstep's own training before a step: it may be called in parts."""
        if self._is_due:
            with self._lock, quiet():
                self._meet(model, is_own=True)
                self._note_changed_weights()

    def _note_own_loss(self, mean: float) -> None:
        """Note the mean loss of a step of evenstep's own, over all shards and processes."""
        if self._is_due:
            with self._lock:
                self._is_own_step = True
                self._write("backward", losses=[mean], gradients=[])

    def _note_gradient(self, model: int, name: str, parameter: torch.Tensor) -> None:
        """Note a gradient as soon as a backward pass has made it, before any exchange."""
        if parameter.grad is not None and self._is_due:
            with self._lock, quiet():
                values = {"values": values_of(parameter.grad)} if self._wants_values(name) else {}
                kept = self._kept.kept_of(parameter.grad)
                self._write("gradient", model=model, name=name, kept=kept, **values)

    def _watched_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            calls = self._calls
            if calls.is_in_backward or not self._is_due:
                return backward(*arguments, **keywords)
            calls.is_in_backward = True
            is_seen = self._level == "operator" and not calls.frames
            try:
                with self._operators if is_seen else contextlib.nullcontext():
                    result = backward(*arguments, **keywords)
            finally:
                calls.is_in_backward = False
            with self._lock, quiet():
                found = [one.detach() for one in tensors_in((arguments, keywords))[:1]]
                self._write(
                    "backward",
                    losses=[number_in_json(float(one)) for one in found if one.numel() == 1],
                    gradients=[
                        self._kept.kept_by_name(
                            (name, one.grad)
                            for name, one in model.parameters()
                            if one.grad is not None
                        )
                        for model in self._models
                    ],
                )
            return result

        return watched

    # ---- updates

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if is_aside() or self._updates.is_done:
            return
        with self._lock, quiet():
            self._meet_optimizer(optimizer)
            if not self._is_due:
                return
            held = self._held_by(optimizer)
            kind = {"class": type(optimizer).__name__}
            self._write(
                "before update",
                optimizer=self._updates.number_of(optimizer),
                settings=[kind | settings_of(group) for group in optimizer.param_groups],
                parameters=[*held],
                groups=[len(group["params"]) for group in optimizer.param_groups],
                gradients=self._kept.kept_by_name(
                    (name, one.grad) for name, one in held.items() if one.grad is not None
                ),
            )

    def _meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._updates.is_known(optimizer):
            held = (*self._held_by(optimizer),)
            is_known = not any(name.startswith("group ") for name in held)
            self._updates.meet(optimizer, held if is_known else id(optimizer))

    def _held_by(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return the parameters that an optimizer updates, by name.

        An optimizer that is a copy may hold others in the same memory.
        What evenstep's own optimizers update besides parameters is parts of them (`Owners()`).
        """
        named = [pair for model in self._models for pair in model.parameters()]
        known = {id(one): name for name, one in named}
        places = {place_of(one): name for name, one in named if one.numel()}
        other = PART if self._is_own_step else "group"
        return {
            known.get(id(one))
            or places.get(place_of(one))
            or f"{other} {place}, parameter {number}": one
            for place, group in enumerate(optimizer.param_groups)
            for number, one in enumerate(group["params"])
        }

    def _after_update(
        self, optimizer: torch.optim.Optimizer, *_: object, is_skipped: bool = False
    ) -> None:
        if is_aside() or self._updates.is_done:
            return
        with self._lock, quiet():
            self._meet_optimizer(optimizer)
            if self._is_due:
                self._write(
                    "update",
                    optimizer=self._updates.number_of(optimizer),
                    step=self._updates.done_by(optimizer),
                    skipped=is_skipped,
                    weights=[one.keep_weights() for one in self._models],
                    buffers=[self._kept.kept_by_name(one.buffers()) for one in self._models],
                    generators=states_of_generators(),
                )
            else:
                for model in self._models:
                    model.forget_weights()
            self._is_own_step = False
            self._updates.count(optimizer)
            if self._updates.is_done:
                self._finish()

    def _watched_scaling(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def watched(
            scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *rest: Any, **more: Any
        ) -> Any:
            if not scaler.is_enabled():
                return step(scaler, optimizer, *rest, **more)
            if self._is_due:
                with self._lock:
                    self._write("scale", scale=scaler.get_scale())
            before = self._updates.done_by(optimizer)
            result = step(scaler, optimizer, *rest, **more)
            if self._updates.done_by(optimizer) == before:
                self._after_update(optimizer, is_skipped=True)
            return result

        return watched

    # ---- data

    def _watched_iteration(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(iterate)
        def watched(loader: Any) -> Any:
            if self._is_due:
                with self._lock, quiet():
                    self._write("epoch", **loader_facts(loader))
            return iterate(loader)

        return watched


@contextlib.contextmanager
def record(
    folder: str | os.PathLike[str],
    *,
    level: str = "module",
    steps: int = 100,
    every: int = 1,
    values: Sequence[str] = (),
    batch_dim: int = 0,
) -> Iterator[None]:
    """Inside `with`, record what this process trains, for `evenstep.compare`.

        with evenstep.record("one.rec", steps=20):
            train()

    Each process of a training writes a file of its own to the folder. Recording changes no bit.

    Args:
        folder: the record, which must not hold a record yet.
        level: "step": each step only; "module": each call of a module, too; "operator": each
            operator of torch, too, which is slow.
        steps: how many updates are recorded, at most.
        every: only every so many updates are recorded.
        values: names of modules and parameters, also as patterns ("layer1.*"), whose outputs and
            gradients are kept as values, too: at most 64 KiB of each tensor.
        batch_dim: the dimension of the model's tensors that counts examples: 1 for recurrent
            layers and transformers without `batch_first=True`.

    Raises:
        InputError: an argument is wrong, or the folder can't be written.
    """
    check_choice("level", level, LEVELS)
    check_integer("steps", steps, at_least=1, at_most=None)
    check_integer("every", every, at_least=1, at_most=None)
    check_integer("batch_dim", batch_dim, at_least=0, at_most=None)
    if isinstance(values, str) or not all(isinstance(one, str) for one in values):
        raise InputError(f"got values={shown(values)}: give a list of names")
    recorder = Recorder(
        Path(folder),
        level=level,
        steps=steps,
        every=every,
        values=values,
        batch_dim=batch_dim,
        rank=job_share(),
        command=sys.argv,
    )
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()
