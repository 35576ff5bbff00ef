"""How an operation runs whose tensors stand for several shards.

There are four ways, from the fastest to the one that always holds:
a view is made of the first shard's tensor, and shows the others too; an operation with a rule
(`rules.py`) runs once for all shards; one that is composed of others runs as those; any other runs
for each shard by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from evenstep.arithmetic.derived import derived
from evenstep.arithmetic.exact import is_exact
from evenstep.arithmetic.operations import COMPOSED, KERNELS
from evenstep.arithmetic.together.blocks import (
    Blocks,
    NotTogetherError,
    blocks_of,
    divide,
    of_shard,
    of_shards,
)
from evenstep.private_torch.dispatch import arguments_of, dispatch_modes, returns_of, written_by

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Rule = Callable[..., Any]

RULES: dict[Any, Rule] = {}
"""What runs an operation for all shards at once: called with the region, the operation and its
arguments. It returns `NotImplemented` for arguments that it can't take."""

OTHER_RULES: list[Callable[[Any], Rule | None]] = []
"""What returns the rule of an operation that is not in `RULES`, or None: looking through all of
torch's operations for those that they are for takes a tenth of a second."""


class Region:
    """A part of the calling thread's computations that stands for several shards.

    Args:
        mode: the thread's mode of portable arithmetic.
        shards: the number of shards.
        randomness: for each shard the context in which random numbers are its own.
    """

    def __init__(
        self, mode: Any, shards: int, randomness: Sequence[AbstractContextManager[object]]
    ) -> None:
        self.mode = mode
        self.shards = shards
        self._randomness = randomness

    def run(self, operation: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run one operation."""
        form = _FORMS.get(id(operation)) or _form(operation)
        if form.is_view:
            return operation(*args, **kwargs)
        if not has_blocks(args) and not (kwargs and has_blocks(kwargs.values())):
            return self._run_shared(form, args, kwargs)
        if form.changes_storage:
            raise NotTogetherError("a tensor's place in its storage")
        if form.is_random and kwargs.get("generator") is not None:
            raise NotTogetherError("random numbers of a generator of the user's own")
        if form.makes_new:
            return self._made(operation(*args, **kwargs))
        if form.writes:
            self._divide_written(form, args, kwargs)
        if form.rule is not None:
            result = form.rule(self, operation, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if form.made_of is not None:
            with self.mode:
                result = form.made_of(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.apart(operation, args, kwargs)

    def compute(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation on tensors of no shard, or of all as one."""
        self.mode.region = None
        try:
            return self.mode.run(operation, args, kwargs)
        finally:
            self.mode.region = self

    def of_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that stands for the shards, from those of all as one."""
        return of_shards(tensor, self.shards)

    def apart(self, operation: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an operation for each shard by itself."""
        form, results = _form(operation), []
        for shard in range(self.shards):
            own_args, own_kwargs = _own((args, dict(kwargs)), shard)
            own_numbers = self._randomness[shard] if form.is_random else contextlib.nullcontext()
            with own_numbers:
                results.append(self.compute(operation, *own_args, **own_kwargs))
        if not any(form.returns) and form.returns:
            return self._joined(results)
        return _written(form, args, kwargs, results)

    def _run_shared(self, form: _Form, args: Args, kwargs: Kwargs) -> Any:
        """Run an operation of tensors that are the same for all shards."""
        if form.is_random and kwargs.get("generator") is None:
            if form.writes:
                self._divide_written(form, args, kwargs)
            return self.apart(form.operation, args, kwargs)
        for place, name in form.writes:
            target = _argument(place, name, args, kwargs)
            if isinstance(target, torch.Tensor) and not self._is_mine(target):
                raise NotTogetherError("a write to a tensor from outside of the shard")
        if form.made_of is not None:
            with self.mode:
                result = form.made_of(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._made(self.compute(form.operation, *args, **kwargs))

    def _made(self, result: Any) -> Any:
        """Note that tensors were made here: they may become those of each shard."""
        for tensor in tensors_in((result,)):
            storage: Any = tensor.untyped_storage()
            storage._evenstep_made_in = self
        return result

    def _is_mine(self, tensor: torch.Tensor) -> bool:
        return getattr(tensor.untyped_storage(), "_evenstep_made_in", None) is self

    def _divide_written(self, form: _Form, args: Args, kwargs: Kwargs) -> None:
        for place, name in form.writes:
            target = _argument(place, name, args, kwargs)
            for tensor in tensors_in((target,)):
                if blocks_of(tensor) is None:
                    if not self._is_mine(tensor):
                        raise NotTogetherError("a write to a tensor from outside of the shard")
                    divide(tensor, self.shards)

    def _joined(self, results: Sequence[Any]) -> Any:
        """Return what stands for the results of all shards."""
        first = results[0]
        if isinstance(first, torch.Tensor):
            if any(one.shape != first.shape or one.dtype != first.dtype for one in results):
                raise NotTogetherError("results of different shapes")
            return self.of_all(torch.stack([*results]))
        if isinstance(first, list | tuple):
            return type(first)([self._joined(part) for part in zip(*results, strict=True)])
        if any(one != first for one in results):
            raise NotTogetherError("a number that differs from shard to shard")
        return first


@contextlib.contextmanager
def computing_together(
    shards: int, randomness: Sequence[AbstractContextManager[object]]
) -> Iterator[Region]:
    """Inside `with`, the calling thread, in portable arithmetic, computes for several shards.

    Args:
        shards: the number of shards, at least 2.
        randomness: for each shard the context in which random numbers are its own.

    Raises:
        NotTogetherError: inside, an operation can't run for all shards at once.
    """
    (mode,) = (one for one in dispatch_modes() if getattr(one, "is_portable", False))
    region = Region(mode, shards, randomness)
    mode.region = region
    try:
        yield region
    finally:
        mode.region = None


class _Form:
    """What has to be known of an operation.

    Attributes:
        operation: the operation.
        is_view: whether its result shares memory with what it is given, and it writes nothing, or
            only the shape of that.
        changes_storage: whether it depends on where a tensor lies in its storage, or changes that.
        makes_new: whether it takes shapes only from its tensors.
        is_random: whether it draws random numbers.
        writes: the places and names of the arguments that it writes to.
        returns: for each result, the place among the arguments of what it is; None if it is new.
        rule: runs it for all shards at once.
        made_of: runs it as others, inside the mode.
    """

    def __init__(self, operation: Any) -> None:
        name = operation.name().removeprefix("aten::").partition(".")[0]
        turns = torch.Tag.inplace_view in operation.tags
        self.operation = operation
        self.writes = written_by(operation)
        if "batch_norm" in name and "backward" not in name:  # torch doesn't declare these
            found = enumerate(arguments_of(operation))
            self.writes += [(at, one.name) for at, one in found if one.name in _STATISTICS]
        self.changes_storage = name in _PLACED
        self.is_view = not self.changes_storage and (
            turns or ((operation.is_view or name in _ALIASES) and not self.writes)
        )
        self.makes_new = name in _LIKE
        self.is_random = torch.Tag.nondeterministic_seeded in operation.tags
        self.returns = returns_of(operation)
        self.rule = RULES.get(operation) or next(
            filter(None, (find(operation) for find in OTHER_RULES)), None
        )
        self.made_of: Callable[..., Any] | None = COMPOSED.get(operation)
        if self.made_of is not None:
            self.made_of = self.made_of if _is_only_composed(self.made_of) else None
        elif operation not in KERNELS and not is_exact(operation):
            self.made_of = derived(operation)


def _is_only_composed(function: Callable[..., Any]) -> bool:
    """Whether a composed function calls nothing in C by itself, with the addresses of tensors."""
    return function.__module__.startswith("evenstep.arithmetic.composed.")


_STATISTICS = ("running_mean", "running_var")
_PLACED = ("resize_", "resize", "set_", "resize_as_", "as_strided_copy", "as_strided_scatter")
_ALIASES = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh"})
_LIKE = (
    *("empty_like", "zeros_like", "ones_like", "full_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
)

_FORMS: dict[int, _Form] = {}  # by the `id` of an operation, which torch keeps for ever


def _form(operation: Any) -> _Form:
    found = _FORMS.get(id(operation))
    return found if found is not None else _FORMS.setdefault(id(operation), _Form(operation))


def has_blocks(values: Any) -> bool:
    """Whether a tensor among values, or in a list of them, stands for shards."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if blocks_of(value) is not None:
                return True
        elif isinstance(value, list | tuple) and has_blocks(value):
            return True
    return False


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _own(value: Any, shard: int) -> Any:
    """Return arguments with each tensor that stands for shards as that of one of them."""
    if isinstance(value, torch.Tensor):
        blocks: Blocks | None = blocks_of(value)
        return value if blocks is None else of_shard(value, blocks, shard)
    if isinstance(value, list | tuple):
        return type(value)([_own(one, shard) for one in value])
    if isinstance(value, dict):
        return {name: _own(one, shard) for name, one in value.items()}
    return value


def _argument(place: int, name: str, args: Args, kwargs: Kwargs) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _written(form: _Form, args: Args, kwargs: Kwargs, results: Sequence[Any]) -> Any:
    """Return what an operation returns that has written to its arguments."""
    if not form.returns:
        return None
    if None in form.returns:
        raise NotTogetherError("an operation that writes, and returns something new")
    found = [_argument(*one, args, kwargs) for one in form.returns if one is not None]
    return found[0] if len(found) == 1 else type(results[0])(found)
