"""States of random generators: lent to code that draws data, saved, and restored."""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from evenstep.batch.rng import DEFAULT_GENERATORS
from evenstep.batch.seeds import derive_seed
from evenstep.devices import accelerator
from evenstep.engine.interrupts import INTERRUPTS, interruptible
from evenstep.errors import InputError

T = TypeVar("T")

_DEPTH = 5  # of objects inside objects that are searched for generators
_MOST_ITEMS = 64  # of a list or dict that is searched
_MOST_OBJECTS = 10_000
_AT_ONCE = 64  # of what a sampler gives

# What holds no generators, or is too large to be searched.
_LEAVES = (torch.Tensor, np.ndarray, str, bytes, int, float, type, types.ModuleType)


class Generator(NamedTuple):
    """A source of random numbers of any library, as three functions.

    Attributes:
        read: returns its state.
        write: sets its state.
        seed: seeds it with an integer below 2**63.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]


DEFAULTS = (
    Generator(
        torch.default_generator.get_state,
        torch.default_generator.set_state,
        torch.default_generator.manual_seed,  # torch.manual_seed would seed the GPUs' too
    ),
    Generator(random.getstate, random.setstate, random.seed),
    Generator(
        functools.partial(np.random.get_state, legacy=False),
        np.random.set_state,
        lambda seed: np.random.seed([seed >> 32, seed & 0xFFFFFFFF]),
    ),
)
"""What code draws from if it names no generator: that of torch on the CPU, Python's, numpy's."""


class BorrowedGenerators:
    """Random numbers of their own for code that draws from the generators of this process.

    Outside of the calls the generators have the states that the user left them in.

        numbers = BorrowedGenerators(DEFAULTS)
        numbers.seed(7)
        numbers.call(torch.rand, 2)

    If `locked`, other threads are kept from torch's default generator during a call.
    """

    def __init__(self, generators: Sequence[Generator], *, locked: bool = True) -> None:
        self._generators = generators
        self._locked = locked
        self._states: list[Any] = []
        self._seeded: list[Any] = []

    @property
    def have_drawn(self) -> bool:
        """Whether a number was drawn since they were seeded."""
        return self.have_drawn_since(self._seeded)

    @property
    def states(self) -> list[Any]:
        """Where the last call has stopped."""
        return self._states

    def have_drawn_since(self, states: Sequence[Any]) -> bool:
        """Return whether a number was drawn since they had these states."""
        return not all(map(same_state, states, self._states))

    @INTERRUPTS.uninterrupted
    def seed(self, seed: int) -> None:
        """Let the next call draw what follows from `seed`."""

        def begin(_: object) -> None:
            _seed(self._generators, seed)
            self._states = self._seeded = _read(self._generators)

        with _alone():
            _put_back_after(begin, self._generators)

    @INTERRUPTS.uninterrupted
    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`, which draws from where the call before has stopped."""

        def resume(_: object) -> T:
            _write(self._generators, self._states)
            try:
                return interruptible(function, *arguments)
            finally:
                self._states = _read(self._generators)

        with _alone() if self._locked else nullcontext():
            return _put_back_after(resume, self._generators)

    def state_dict(self) -> list[Any]:
        """Return the states as plain values and tensors."""
        return [_plain(state) for state in self._states]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """Continue where `state_dict` was called."""
        if len(states) != len(self._generators):
            raise ValueError(f"{len(states)} generators were saved, {len(self._generators)} exist")
        self._states = [_from_plain(state) for state in states]


@INTERRUPTS.uninterrupted
def call_seeded(
    generators: Sequence[Generator], seed: int, function: Callable[..., T], *arguments: Any
) -> T:
    """Return `function(*arguments)`, which draws what follows from `seed`.

    Afterwards the generators have the states that the user left them in.
    """

    def draw(_: object) -> T:
        _seed(generators, seed)
        return interruptible(function, *arguments)

    with _alone():
        return _put_back_after(draw, generators)


def drew_nothing(generators: Sequence[Generator], function: Callable[[], T]) -> tuple[T, bool]:
    """Return `function()`, and whether the generators are as they were; they are put back."""

    def draw(before: list[Any]) -> tuple[T, bool]:
        result = interruptible(function)
        return result, all(map(same_state, before, _read(generators)))

    with _alone():
        return _put_back_after(draw, generators)


def generators_of(*owners: object) -> tuple[Generator, ...]:
    """Return the default generators, and those that `owners` hold: also deep inside of them."""
    found: dict[int, Generator] = {}
    seen = {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}
    level = [*owners]
    for _ in range(_DEPTH):
        inside: list[object] = []
        for one in level:
            if id(one) in seen or len(seen) > _MOST_OBJECTS:
                continue
            seen.add(id(one))
            generator = _generator(one)
            if generator is not None:
                found[id(one)] = generator
            else:
                inside += _inside(one)
        level = inside
    return (*DEFAULTS, *found.values())


def order_of(sampler: Any, seed: int, epoch: int, own: object = None) -> Iterator[Any]:
    """Draw what a sampler gives in an epoch, with all that it draws from seeded by (seed, epoch).

    The sampler may have others inside it, and may draw from the generator `own` besides.
    """
    samplers = samplers_in(sampler)
    numbers = BorrowedGenerators(generators_of(own, *samplers))
    numbers.seed(derive_seed("sampler", seed, epoch))

    def begin() -> Iterator[Any]:  # in one call: other threads may begin other epochs
        set_epoch_of(epoch, *samplers)
        order = iter(sampler)
        return itertools.chain(_some(order), order)

    order = numbers.call(begin)
    while some := numbers.call(_some, order):
        yield from some


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a loader, the outermost first."""
    return samplers_in(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def samplers_in(sampler: Any) -> list[Any]:
    """Return a sampler, and those inside it."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is other for other in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def set_epoch_of(epoch: int, *parts: object) -> None:
    """Call `set_epoch` of those that have it."""
    for part in parts:
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def states_of(generators: Sequence[Generator]) -> list[Any]:
    """Return the states of generators as plain values and tensors."""
    return [_plain(generator.read()) for generator in generators]


def restore_states(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    """Set the states that `states_of` returned."""
    for generator, state in zip(generators, states, strict=True):
        generator.write(_from_plain(state))


class GeneratorStates:
    """The states of the random generators of this process, saved and restored with a training.

        trainer = evenstep.Trainer(..., state={"random": evenstep.data.GeneratorStates()})

    They are those of torch's default generators (CPU and GPUs), of `random` and of `numpy.random`.
    After `Trainer.load`, code of your own that draws from them, such as augmentation in the
    training loop, continues the sequence of numbers where it was saved. (Dropout and other random
    layers, and the order of `Trainer.epoch`, don't need this: evenstep seeds them for each step and
    epoch.) A signal handler that saves while evenstep draws a data set's numbers saves the
    states that you left.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states as plain values and tensors."""
        cuda = accelerator.generator_states()
        with _alone():  # a handler of a signal may save while they are lent
            states = _users_states[0] if _users_states else _read(DEFAULTS)
            torch_state, python, numpy = map(_plain, states[: len(DEFAULTS)])
        return {"torch": torch_state, "python": python, "numpy": numpy, "cuda": cuda}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the states; skip those of GPUs that this machine does not have."""
        restore_states(DEFAULTS, [state_dict[name] for name in ("torch", "python", "numpy")])
        accelerator.set_generator_states(state_dict["cuda"])


# ---- the parts of the above


def _some(order: Iterator[Any]) -> list[Any]:
    return [*itertools.islice(order, _AT_ONCE)]


def _alone() -> Any:
    """Keep lanes from torch's default generator.

    A worker process has no lanes, and may have been forked while a lane held the lock.
    """
    return DEFAULT_GENERATORS if get_worker_info() is None else nullcontext()


def _seed(generators: Sequence[Generator], seed: int) -> None:
    for number, generator in enumerate(generators):
        generator.seed(derive_seed("generator", seed, number) if number > 2 else seed)


_users_states: list[list[Any]] = []
"""The users' states of generators that are lent now: first `DEFAULTS`, then others."""


def _put_back_after(draw: Callable[[list[Any]], T], generators: Sequence[Generator]) -> T:
    """Return `draw(states)`; afterwards the generators have these states again, the user's.

    No context manager: an exception that is thrown into this thread where its `__exit__` begins
    would leave the generators, and with them the user's checkpoints, in the wrong states.
    """
    before = _read(generators)
    try:
        _users_states.append(before)
        return draw(before)
    finally:
        try:
            _put_back(generators, before)
        except BaseException:  # maybe thrown into this thread, and has cut that off
            _put_back(generators, before)
            raise


def _put_back(generators: Sequence[Generator], states: list[Any]) -> None:
    try:
        _write(generators, states)
    finally:  # else checkpoints would hold them for good
        _users_states[:] = [one for one in _users_states if one is not states]


def _read(generators: Sequence[Generator]) -> list[Any]:
    return [generator.read() for generator in generators]


def _write(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.write(state)


def _generator(one: object) -> Generator | None:
    if isinstance(one, torch.Generator):
        return Generator(one.get_state, one.set_state, one.manual_seed)
    if isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):
        return Generator(one.getstate, one.setstate, one.seed)
    if isinstance(one, np.random.RandomState):
        return Generator(
            functools.partial(one.get_state, legacy=False),
            one.set_state,
            lambda seed: one.seed([seed >> 32, seed & 0xFFFFFFFF]),
        )
    if isinstance(one, np.random.Generator):
        bits: Any = one.bit_generator
        kind = type(bits)
        write = functools.partial(setattr, bits, "state")
        return Generator(lambda: bits.state, write, lambda seed: write(kind(seed).state))
    return None


def _inside(one: object) -> list[object]:
    """Return what an object refers to and may draw from."""
    if one is None or isinstance(one, _LEAVES):
        return []
    if isinstance(one, dict):
        return [*one.values()] if len(one) <= _MOST_ITEMS else []
    if isinstance(one, list | tuple | set):
        return [*one] if len(one) <= _MOST_ITEMS else []
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, types.MethodType):
        return [one.__self__]
    if isinstance(one, types.FunctionType):
        cells = [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
        return [*cells, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
    if type(one).__module__.startswith("datasets."):  # Hugging Face's follow from set_epoch
        return []
    attributes = getattr(one, "__dict__", None)
    held = [*attributes.values()] if isinstance(attributes, dict) else []
    return held + _in_slots(one)


def _in_slots(one: object) -> list[object]:
    slots = [
        slot
        for kind in type(one).__mro__
        for slot in vars(kind).values()
        if isinstance(slot, types.MemberDescriptorType)
    ]
    held = []
    for slot in slots:
        with suppress(AttributeError):  # nothing was assigned
            held.append(slot.__get__(one))
    return held


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def same_state(one: Any, other: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same_state(value, other[key]) for key, value in one.items())
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def _plain(state: Any) -> Any:
    """Return a generator's state without arrays of numpy."""
    if isinstance(state, np.ndarray):
        return {"array": str(state.dtype), "words": state.tolist()}
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state


def _from_plain(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if state.keys() == {"array", "words"}:
        if state["array"] not in ("uint32", "uint64"):
            raise InputError(f"got a generator's state of {state['array']}: uint32 is needed")
        return np.array(state["words"], dtype=state["array"])
    return {key: _from_plain(value) for key, value in state.items()}
