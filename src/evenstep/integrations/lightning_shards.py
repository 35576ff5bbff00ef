"""A LightningModule's `training_step`, called for each shard; its results and logs merged."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from evenstep.errors import ContractError, InputError, ModelError, shown
from evenstep.shard.loss import Number, Outputs

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}


class _Logged(NamedTuple):
    """How `self.log` was called, without the value."""

    name: str
    reduction: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]


class _Call(NamedTuple):
    """A call of `self.log` in a shard."""

    logged: _Logged
    value: torch.Tensor
    batch_size: Number | None


_CALLS: contextvars.ContextVar[list[_Call] | None] = contextvars.ContextVar("calls", default=None)


class ShardSteps:
    """The objective of a training: calls `training_step` with a shard's examples.

    Attributes:
        is_first: whether no step was taken. Then lists and metrics that grow are looked for.
    """

    def __init__(self, trainer: Any) -> None:
        self.is_first = True
        self._trainer = _SharedTrainer(trainer)
        self._logged: dict[str, _Logged] = {}
        self._grown = set[tuple[int, str]]()

    @contextlib.contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """Inside `with`, the module may be called for shards: it logs here, and not to Lightning.

        Its trainer is then an object that never changes: evenstep looks for changes of the module
        in everything that it holds.
        """
        holders = _holders(module)
        outer, trainer, log = holders[0], holders[0]["_trainer"], holders[0].get("log")
        self._logged = {}
        try:
            _give(holders, self._trainer)
            outer["log"] = _log_in_shard
            yield
        finally:
            _give(holders, trainer)
            outer["log"] = log
            if log is None:
                del outer["log"]

    def __call__(self, module: Any, batch: Any, *rest: Any) -> tuple[torch.Tensor, Number, Outputs]:
        """Return the total, the count and the outputs of one shard.

        `rest` has what `training_step` gets besides, and a tensor with an element for each example.
        """
        *given, rows = rest
        if module._trainer is None:  # a copy of a LightningModule has none
            _give(_holders(module), self._trainer)
        before = _sizes(module) if self.is_first else {}
        calls: list[_Call] = []
        token = _CALLS.set(calls)
        try:
            result = module.training_step(batch, *given)
        finally:
            _CALLS.reset(token)
        if before:
            self._refuse_grown(module, before)
        returned = dict(result) if isinstance(result, Mapping) else {"loss": result}
        loss, count = returned.pop("loss", None), returned.get("count", len(rows))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ModelError(
                f"training_step returned {shown(result)}: a scalar tensor is needed, the mean loss "
                f"over the examples of its batch, or a dict with it as 'loss'"
            )
        outputs = self._outputs_of_calls(calls, len(rows))
        outputs |= {name: _output(name, one, len(rows)) for name, one in returned.items()}
        if not count:  # a mean of nothing is not a number
            return torch.zeros((), device=loss.device), 0, outputs
        return loss * count, count, outputs

    def merged(self, module: Any, outputs: Outputs) -> dict[str, Any]:
        """Log what the shards of a step have logged, merged; return what they returned besides."""
        returned = dict(outputs)
        for key in [key for key in outputs if key in self._logged]:
            logged, value = self._logged[key], returned.pop(key)
            options = dict(logged.options)
            if logged.reduction in ("min", "max"):
                value = getattr(value, logged.reduction)()
            if f"{key}, batch_size" in returned:
                options["batch_size"] = round(returned.pop(f"{key}, batch_size"))
            module.log(logged.name, value, *logged.args, **options)
        self.is_first = False
        return returned

    def _outputs_of_calls(self, calls: Sequence[_Call], examples: int) -> dict[str, Any]:
        """Return what a shard has logged, in the form in which evenstep merges outputs."""
        outputs: dict[str, Any] = {}
        for logged, value, batch_size in calls:
            key = f"self.log({logged.name!r})"
            if key in outputs or self._logged.setdefault(key, logged) != logged:
                raise ModelError(
                    f"training_step calls {key} twice, or with different arguments for different "
                    f"parts of the batch: log each value under its own name"
                )
            weight = examples if batch_size is None else batch_size
            rows = value.expand(examples)
            mean = (value * weight, weight) if weight else (0.0, 0)  # a mean of nothing is NaN
            kinds = {"mean": mean, "sum": value, "min": rows, "max": rows}
            outputs[key] = kinds[logged.reduction]
            if batch_size is not None:
                outputs[f"{key}, batch_size"] = batch_size
        return outputs

    def _refuse_grown(self, module: nn.Module, before: Mapping[str, int]) -> None:
        """Refuse a list or metric that each shard on one copy of the module adds to."""
        for name, size in _sizes(module).items():
            if size <= before.get(name, size):
                continue
            if (id(module), name) in self._grown:  # the first time may have filled a cache
                raise ContractError(
                    f"training_step adds to {type(module).__name__}.{name}, but every device has "
                    f"its own copy of it: return the values in a dict beside 'loss', as numbers or "
                    f"rows, and add them in on_train_batch_end"
                )
            self._grown.add((id(module), name))


class _SharedTrainer:
    """Lightning's Trainer, as `training_step` reads it: one object for all copies of the module."""

    __slots__ = ("_read",)

    def __init__(self, trainer: Any) -> None:
        object.__setattr__(self, "_read", weakref.ref(trainer))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._read(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._read(), name, value)


def _holders(module: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of a LightningModule, and of those inside it."""
    return [vars(one) for one in module.modules() if "_trainer" in vars(one)]


def _give(holders: Sequence[dict[str, Any]], trainer: Any) -> None:
    for holder in holders:
        holder["_trainer"] = trainer


def _log_in_shard(
    name: str,
    value: Any,
    *args: Any,
    reduce_fx: Any = "mean",
    batch_size: Number | None = None,
    **options: Any,
) -> None:
    """Take the place of `self.log` while shards are computed."""
    calls = _CALLS.get()
    if calls is None:
        raise InputError(
            f"self.log({name!r}) was called in the backward pass: call it in training_step or in "
            f"on_after_backward"
        )
    reduction = _REDUCTIONS.get(getattr(reduce_fx, "__name__", str(reduce_fx)).lower())
    is_number = _is_number(value) and (not isinstance(value, torch.Tensor) or value.numel() == 1)
    if not is_number or reduction is None:
        what = f"reduce_fx={shown(reduce_fx)}" if is_number else f"a {type(value).__name__}"
        raise InputError(
            f"training_step calls self.log({name!r}) with {what}: a number is needed, which is "
            f"merged over shards by mean, sum, min or max. For a metric, return its rows in a dict "
            f"beside 'loss', and update and log it in on_train_batch_end"
        )
    logged = _Logged(name, reduction, args, {"reduce_fx": reduce_fx, **options})
    calls.append(_Call(logged, _exact(value).reshape(()), batch_size))


def _output(name: str, value: Any, examples: int) -> Any:
    """Return a value of `training_step`'s dict as an output: a sum, rows, or a mean's parts."""
    if not _is_number(value):
        raise ModelError(
            f"training_step returned {shown(value)} as {name!r}: a number is needed, or a tensor "
            f"with a row for each example"
        )
    if name == "count" or (isinstance(value, torch.Tensor) and value.ndim):
        return value
    return _exact(value) * examples, examples


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor | int | float)


def _exact(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).detach().to(torch.float64)


def _sizes(module: nn.Module) -> dict[str, int]:
    """Return the lengths of a module's lists, and how often its metrics were updated."""
    sizes = {"": 0}
    for path, child in module.named_modules():
        updates = getattr(child, "update_count", None)
        if isinstance(updates, int):  # a metric of torchmetrics
            sizes[path] = updates
            continue
        for key, value in vars(child).items():
            held = [*value.values()] if isinstance(value, dict) else [value]
            lists = [one for one in held if isinstance(one, list | collections.deque)]
            sizes[f"{path}.{key}" if path else key] = sum(map(len, lists))
    return sizes
