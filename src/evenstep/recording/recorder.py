"""Writes down a PyTorch run as it happens, by torch's global hooks; it changes no bit of the run.

What is recorded in an optimizer step: the examples that reach the model, inputs and outputs of its
modules, the losses that are backpropagated, gradients (when a backward pass has made them, at its
end, and when the optimizer sees them), and weights, buffers and settings after the update.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optree
import torch
from torch import nn
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers

from evenstep.errors import InputError, shown
from evenstep.recording.digests import digests_of_examples, kept_of
from evenstep.recording.facts import facts_here, loader_facts, states_of_generators
from evenstep.recording.record_file import FORMAT, VERSION, RecordFile

LEVELS = ("step", "module")
"""What is kept: of each step only, or of each call of a module, too."""

_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and `torch.compile` give to names."""


class Recorder:
    """Records this process from `start` on; the file is created at the first call of a model.

    Args:
        folder: the record: a folder with a file for each process.
        level: one of `LEVELS`.
        steps: the updates that are recorded.
        every: only every so many updates are recorded, from the first on.
        most_nbytes: the largest file.
        rank: the number of this process, and the number of processes, where `torch.distributed`
            does not say it.
        command: what was started, for the header.
        environment: variables that may change results, for the header.
    """

    def __init__(
        self,
        folder: Path,
        *,
        level: str = "module",
        steps: int = 100,
        every: int = 1,
        most_nbytes: int = 1 << 30,
        rank: tuple[int, int] = (0, 1),
        command: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._level = folder, level
        self._steps, self._every, self._most_nbytes = steps, every, most_nbytes
        self._rank = rank
        self._header = {"level": level, "every": every, "command": [*command]}
        self._environment = environment or {}
        self._process = os.getpid()
        self._file: RecordFile | None = None
        self._waiting: list[Mapping[str, Any]] = []  # until the file is there
        self._updates: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._updates = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._numbers = weakref.WeakKeyDictionary()
        self._models: list[_Model] = []
        self._depth = threading.local()
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()
        self._names: dict[int, str] = {}

    def start(self) -> None:
        """Record from now on."""
        undo = self._undo
        for made in (
            hooks_of_modules.register_module_forward_pre_hook(self._before_call),
            hooks_of_modules.register_module_forward_hook(
                self._after_call, with_kwargs=True, always_call=True
            ),
            hooks_of_optimizers.register_optimizer_step_pre_hook(self._before_update),
            hooks_of_optimizers.register_optimizer_step_post_hook(self._after_update),
        ):
            undo.callback(made.remove)
        undo.enter_context(_replaced(torch.Tensor, "backward", self._watched_backward))
        undo.enter_context(_replaced(torch.autograd, "backward", self._watched_backward))
        loader = torch.utils.data.DataLoader
        undo.enter_context(_replaced(loader, "__iter__", self._watched_iteration))

    def stop(self) -> None:
        """Record no more, and close the file."""
        with self._lock:
            self._undo.close()
            if self._file is not None:
                self._file.close()

    def _write(self, event: Mapping[str, Any]) -> None:
        """Add an event to the file, once there is one."""
        if self._file is None:
            self._waiting.append(event)
        else:
            self._file.write(event)

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

    # ---- calls of modules

    @property
    def _is_due(self) -> bool:
        """Whether the update that the run is working towards is recorded."""
        done = min(self._updates.values(), default=0)
        is_here = os.getpid() == self._process  # not in a forked worker of a loader
        return is_here and done < self._steps * self._every and done % self._every == 0

    def _before_call(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        calls = self._depth.__dict__.setdefault("calls", [])
        draws = torch.default_generator.get_state() if self._is_due else None
        calls.append(draws)
        if len(calls) == 1 and self._is_due and not _is_scripting():
            with self._lock, _quiet():
                self._meet(module)

    def _after_call(self, module: nn.Module, arguments: tuple[Any, ...], *rest: Any) -> None:
        """Note a call that has ended; after an exception, torch gives no output."""
        calls = self._depth.__dict__.get("calls")
        if not calls:
            return
        draws = calls.pop()
        if len(rest) < 2 or draws is None or _is_scripting() or not self._is_due:
            return
        is_whole = not calls
        if self._level != "module" and not is_whole:
            return
        has_grad, autocast = torch.is_grad_enabled(), _autocast()
        with self._lock, _quiet():
            inputs, outputs = _tensors_in((arguments, rest[0])), _tensors_in(rest[1])
            examples = _examples_of(inputs)
            model = self._model_of(module) if is_whole else None
            event = {
                "what": "call",
                "module": "" if is_whole else self._names.get(id(module), type(module).__name__),
                "class": type(module).__name__,
                "trains": module.training,
                "grad": has_grad,
                "in": [kept_of(one, examples=examples) for one in inputs],
                "out": [kept_of(one, examples=examples) for one in outputs],
                "drew": not torch.equal(draws, torch.default_generator.get_state()),
            }
            if model is not None:
                event["model"] = model.number
                event["autocast"] = autocast
                if examples is not None:
                    event["examples"] = digests_of_examples(inputs, examples)
            self._write(event)

    def _meet(self, module: nn.Module) -> None:
        """Note a model at its first call, and parameters that it got since."""
        if not any(True for _ in module.parameters()):
            return
        model = self._model_of(module)
        if model is None:
            if any(one.holds(module) for one in self._models):  # a part of a model that is known
                return
            if self._file is None:
                self._open_file()
            model = _Model(module, len(self._models))
            self._models.append(model)
            self._write(
                {
                    "what": "model",
                    "model": model.number,
                    "class": type(module).__name__,
                    "wrapped": _names_of_wrappers(module),
                    "weights": self._kept_by_name(model.parameters()),
                    "buffers": self._kept_by_name(model.buffers()),
                    "frozen": [name for name, one in model.parameters() if not one.requires_grad],
                }
            )
        for name, child in module.named_modules():
            self._names.setdefault(id(child), _bare(name))
        for name, parameter in model.parameters():
            if parameter.requires_grad and parameter.is_leaf and name not in model.watched:
                model.watched.add(name)
                noted = functools.partial(self._note_gradient, model.number, name)
                noted.only_reads = True  # type: ignore[attr-defined]
                handle = parameter.register_post_accumulate_grad_hook(noted)
                self._undo.callback(handle.remove)

    def _model_of(self, module: nn.Module) -> _Model | None:
        return next((one for one in self._models if one.module() is module), None)

    # ---- gradients

    def _note_gradient(self, model: int, name: str, parameter: torch.Tensor) -> None:
        """Note a gradient as soon as a backward pass has made it, before any exchange."""
        if parameter.grad is not None and self._is_due:
            with self._lock, _quiet():
                kept = kept_of(parameter.grad)
                self._write({"what": "gradient", "model": model, "name": name, "kept": kept})

    def _watched_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            depth = self._depth.__dict__
            is_outer = not depth.get("backward")
            depth["backward"] = True
            try:
                result = backward(*arguments, **keywords)
            finally:
                if is_outer:
                    depth["backward"] = False
            if is_outer and self._is_due:
                with self._lock, _quiet():
                    losses = _tensors_in((arguments, keywords))[:1]
                    self._write(
                        {
                            "what": "backward",
                            "losses": [_value_of(one) for one in losses if one.numel() == 1],
                            "gradients": self._gradients(),
                        }
                    )
            return result

        return watched

    def _gradients(self) -> list[dict[str, Any]]:
        """Return the gradients of each model by name."""
        return [
            self._kept_by_name(
                (name, one.grad) for name, one in model.parameters() if one.grad is not None
            )
            for model in self._models
        ]

    # ---- updates

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._is_due:
            return
        with self._lock, _quiet():
            known = {id(one): name for model in self._models for name, one in model.parameters()}
            held = {
                known.get(id(one), f"group {place}, parameter {number}"): one
                for place, group in enumerate(optimizer.param_groups)
                for number, one in enumerate(group["params"])
            }
            self._write(
                {
                    "what": "before update",
                    "optimizer": self._number_of(optimizer),
                    "class": type(optimizer).__name__,
                    "settings": [_settings_of(group) for group in optimizer.param_groups],
                    "parameters": [*held],
                    "gradients": self._kept_by_name(
                        (name, one.grad) for name, one in held.items() if one.grad is not None
                    ),
                }
            )

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        with self._lock, _quiet():
            done = self._updates.get(optimizer, 0)
            if self._is_due:
                self._write(
                    {
                        "what": "update",
                        "optimizer": self._number_of(optimizer),
                        "step": done,
                        "weights": [self._kept_by_name(one.parameters()) for one in self._models],
                        "buffers": [self._kept_by_name(one.buffers()) for one in self._models],
                        "generators": states_of_generators(),
                    }
                )
            self._updates[optimizer] = done + 1
            if min(self._updates.values()) >= self._steps * self._every:
                self._write({"what": "end"})
                self.stop()

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        self._updates.setdefault(optimizer, 0)
        return self._numbers.setdefault(optimizer, len(self._numbers))

    # ---- data

    def _watched_iteration(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(iterate)
        def watched(loader: Any) -> Any:
            if self._is_due:
                with self._lock, _quiet():
                    self._write({"what": "epoch", **loader_facts(loader)})
            return iterate(loader)

        return watched

    def _kept_by_name(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        return {name: kept_of(one) for name, one in named}


@contextlib.contextmanager
def record(
    folder: str | os.PathLike[str], *, level: str = "module", steps: int = 100, every: int = 1
) -> Iterator[None]:
    """Inside `with`, record what this process trains, for `evenstep.compare`.

        with evenstep.record("one.rec", steps=20):
            train()

    Each process of a training writes a file of its own to the folder. Recording changes no bit.

    Args:
        folder: the record, which must not hold a record yet.
        level: "module": each call of a module; "step": each step only.
        steps: how many updates are recorded, at most.
        every: only every so many updates are recorded.

    Raises:
        InputError: an argument is wrong, or the folder can't be written.
    """
    if level not in LEVELS:
        raise InputError(f"got level={shown(level)}: give {' or '.join(map(repr, LEVELS))}")
    for name, number in (("steps", steps), ("every", every)):
        if not isinstance(number, int) or number < 1:
            raise InputError(f"got {name}={shown(number)}: give a number from 1 on")
    recorder = Recorder(Path(folder), level=level, steps=steps, every=every, command=sys.argv)
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()


class _Model:
    """A model that was called by itself: not from another module."""

    def __init__(self, module: nn.Module, number: int) -> None:
        self.module = weakref.ref(module)
        self.number = number
        self.watched: set[str] = set()

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is a part of the model."""
        mine = self.module()
        return mine is not None and any(one is module for one in mine.modules())

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters by the names that they have without wrappers."""
        mine = self.module()
        for name, one in () if mine is None else mine.named_parameters():
            yield _bare(name), one

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the buffers by the names that they have without wrappers."""
        mine = self.module()
        for name, one in () if mine is None else mine.named_buffers():
            yield _bare(name), one


@contextlib.contextmanager
def _replaced(owner: Any, name: str, watched: Callable[[Any], Any]) -> Iterator[None]:
    """Inside `with`, a function is another one, unless somebody has replaced that too."""
    before = getattr(owner, name)
    mine = watched(before)
    setattr(owner, name, mine)
    try:
        yield
    finally:
        if getattr(owner, name) is mine:
            setattr(owner, name, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside `with`, nothing of what is computed gets a graph, or another dtype by autocast."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _is_scripting() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _autocast() -> str | None:
    return str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None


def _bare(name: str) -> str:
    name += "."
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name.removesuffix(".")


def _names_of_wrappers(module: nn.Module) -> list[str]:
    inner = getattr(module, "module", None)
    return [type(module).__name__] if isinstance(inner, nn.Module) else []


def _tensors_in(values: Any) -> list[torch.Tensor]:
    leaves: list[Any] = optree.tree_leaves(values, namespace="torch")
    return [leaf for leaf in _opened(leaves) if isinstance(leaf, torch.Tensor)]


def _opened(leaves: Iterable[Any]) -> Iterator[Any]:
    """Yield leaves; of objects that hold tensors as attributes (outputs of models), those."""
    for leaf in leaves:
        if isinstance(leaf, Mapping):
            yield from leaf.values()
        else:
            yield leaf


def _examples_of(tensors: list[torch.Tensor]) -> int | None:
    first = next((one for one in tensors if one.dim() > 0), None)
    return None if first is None else len(first)


def _value_of(loss: torch.Tensor) -> float | str:
    value = float(loss.detach())
    return value if abs(value) < float("inf") else str(value)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group of parameters: learning rate, momentum and so on."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool | int | float | str | None):
            found[name] = value
        elif isinstance(value, tuple):
            found[name] = [one for one in value if isinstance(one, int | float)]
    return found
