"""Finds the generators besides torch's default ones that a shard draws from, and where it does so.

`random`, `numpy.random` and generator objects that live on from shard to shard give numbers that
depend on what was drawn from them before, by other shards and other threads. A generator that the
shard makes and seeds itself does no harm.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from evenstep.batch.rng import default_generator, is_autograds_thread, watched_generators
from evenstep.errors import ContractError
from evenstep.private_torch.graph import is_in_backward

_UNNOTICED = {"torch", "tempfile", "uuid", "email", "logging", "multiprocessing", "asyncio"}
"""Packages whose own draws (names of files, delays) don't reach what a shard computes."""

_ONE_AT_A_TIME = threading.Lock()


class ForeignDraw(NamedTuple):
    """A place in the code that draws from a generator which evenstep does not control.

    `what` is the generator in words. The generator itself is kept alive, so that its identity stays
    its own; it `outlives` the shard if it is known to have existed before.
    """

    what: str
    file: str
    line: int
    function: str
    generator: object
    outlives: bool

    @property
    def place(self) -> tuple[str, str, int]:
        """What is drawn from, and where."""
        return self.what, self.file, self.line


class ForeignDraws:
    """Inside `with`, notes what the calling thread draws from foreign generators.

    It sees the draws of autograd's threads too, as far as they are torch's and numpy's; those of
    other threads are left alone. One thread at a time can be inside. Nothing that is drawn changes.

        with ForeignDraws() as first:
            compute_shard(...)
        with ForeignDraws(after=first) as second:
            compute_shard(...)  # the same shard again
        refuse_foreign_draws(first, second)

    Args:
        thorough: whether to watch every generator object of numpy, for which all objects of the
            process are looked through (a tenth of a second or more), besides numpy's global one.
        after: an earlier look; then only objects that are newer are looked through.

    Attributes:
        found: the draws, each place once, in their order.
        has_run_in_backward: whether Python code has run in a backward pass (of a hook, a function
            of the user's, a mode), or whether that is unknown, since something else profiles.
    """

    def __init__(self, *, thorough: bool = False, after: ForeignDraws | None = None) -> None:
        self._thorough = thorough
        self._objects: _NumpyObjects = _NumpyObjects() if after is None else after._objects
        self.found: list[ForeignDraw] = []
        self.has_run_in_backward = False
        self._thread = 0
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> ForeignDraws:
        with contextlib.ExitStack() as opened:
            opened.enter_context(_ONE_AT_A_TIME)
            self._thread = threading.get_ident()
            opened.enter_context(_watched_numpy(self, self._generators()))
            opened.enter_context(watched_generators(self._run))
            self.has_run_in_backward = sys.getprofile() is not None
            if not self.has_run_in_backward:  # do not replace another profiler
                sys.setprofile(self._profile)
                opened.callback(sys.setprofile, None)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def _generators(self) -> list[Any]:
        """Return the generators of numpy that are watched."""
        return self._objects.look() if self._thorough else [np.random.mtrand._rand]

    def _run(self, given: torch.Generator, run: Callable[[], Any]) -> Any:
        """Run a random op of torch, and note the generator that the model passes to it."""
        is_default = _equals_default(given)
        result = run()
        frame = _first_frame(sys._getframe(1), {"torch", "evenstep"})
        if is_default and _equals_default(given):
            self._note("torch's default generator, given by generator=", given, frame, True)
        else:
            self._note("a torch.Generator", given, frame, False)
        return result

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a draw from one of Python's generators; called by Python for each call."""
        if event != "c_call":
            if event == "call" and not self.has_run_in_backward:
                self.has_run_in_backward = is_in_backward()
            return
        generator = getattr(argument, "__self__", None)
        if isinstance(generator, random.Random) and argument.__name__ in ("random", "getrandbits"):
            drawing = _first_frame(frame, {"random"})
            if generator is random._inst:
                self._note("Python's random module", generator, drawing, True)
            else:
                self._note("a random.Random", generator, drawing, False)

    def note_numpy(self, generator: object, frame: FrameType) -> None:
        """Note a draw from one of numpy's generators, if the shard makes it."""
        if threading.get_ident() != self._thread and not is_autograds_thread():
            return
        drawing = _first_frame(frame, {"numpy"})
        if generator is np.random.mtrand._rand:
            self._note("numpy.random", generator, drawing, True)
        else:
            self._note(f"a numpy.random.{type(generator).__name__}", generator, drawing, True)

    def _note(self, what: str, generator: object, frame: FrameType | None, outlives: bool) -> None:
        if frame is None or _package(frame) in _UNNOTICED:
            return
        code = frame.f_code
        draw = ForeignDraw(
            what, code.co_filename, frame.f_lineno, code.co_name, generator, outlives
        )
        if not any(one.place == draw.place and _are_one(one, draw) for one in self.found):
            self.found.append(draw)


def outliving(first: ForeignDraws, second: ForeignDraws) -> list[ForeignDraw]:
    """Return the draws, in two computations of one shard, from generators that outlive it."""
    found: dict[object, ForeignDraw] = {}
    for draws, others in ((first.found, second.found), (second.found, first.found)):
        for draw in draws:
            if draw.outlives or any(_are_one(draw, other) for other in others):
                found.setdefault(draw.place, draw)
    return [*found.values()]


def refuse_foreign_draws(first: ForeignDraws, second: ForeignDraws) -> None:
    """Refuse a model or objective that draws from generators that live on from shard to shard."""
    for draw in outliving(first, second):
        raise ContractError(
            f"a shard draws from {draw.what} in {draw.file}, line {draw.line} (in "
            f"{draw.function}), so its result depends on what other shards and threads have drawn "
            f"before: draw with functions of torch without generator=, which evenstep seeds for "
            f"each shard, or draw in the data loader and pass the numbers in the batch"
        )


# ---- which generator


def _are_one(draw: ForeignDraw, other: ForeignDraw) -> bool:
    """Whether two draws were from one generator.

    An op sees a torch.Generator as a new Python object each time. So one of the two is seeded for a
    moment: if the other one changes, they are one.
    """
    mine, its = draw.generator, other.generator
    if not isinstance(mine, torch.Generator) or not isinstance(its, torch.Generator):
        return mine is its
    if mine.device != its.device:
        return False
    before = mine.get_state()
    if not torch.equal(before, its.get_state()):
        return False
    if draw.outlives:  # the default generator, which other threads use
        return other.outlives
    mine.manual_seed(mine.initial_seed() ^ 1)
    try:
        return not torch.equal(before, its.get_state())
    finally:
        mine.set_state(before)


def _equals_default(generator: torch.Generator) -> bool:
    default = default_generator(generator.device)
    return torch.equal(generator.get_state(), default.get_state())


# ---- which place


def _first_frame(frame: FrameType | None, packages: set[str]) -> FrameType | None:
    """Return the innermost frame that is in none of `packages`, nor in this module."""
    while frame is not None and (
        _package(frame) in packages or frame.f_globals.get("__name__") == __name__
    ):
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


# ---- numpy


class _NumpyObjects:
    """The generator objects of numpy in this process."""

    def __init__(self) -> None:
        self._found: dict[int, Any] = {}
        self._collected: list[int] = []

    def look(self) -> list[Any]:
        """Return them. A second look goes through the newest objects, where all new ones are.

        They are if the garbage collector has moved none to its oldest generation meanwhile.
        """
        collected = [one["collections"] for one in gc.get_stats()[1:]]
        is_first = collected != self._collected
        objects = _tracked_objects() if is_first else gc.get_objects(0) + gc.get_objects(1)
        self._collected = collected
        kinds = (np.random.Generator, np.random.RandomState)
        self._found |= {id(one): one for one in objects if issubclass(type(one), kinds)}
        return [*self._found.values()]


@contextlib.contextmanager
def _watched_numpy(draws: ForeignDraws, generators: list[Any]) -> Iterator[None]:
    """Inside `with`, numpy's generators report each draw to `draws`, in the drawing thread.

    A generator object holds the lock of its bit generator while it draws. Here it is given one that
    looks whether the bit generator has moved. Profiling does not show calls of numpy's functions.
    """
    watched: list[tuple[Any, Any]] = []
    try:
        for generator in generators:
            bits = generator._bit_generator
            if isinstance(generator, np.random.Generator) or isinstance(bits, np.random.MT19937):
                watched.append((generator, bits))
                _give(generator, bits, _WatchedBits(bits, _WatchedLock(draws, generator, bits)))
        yield
    finally:
        for generator, bits in watched:
            _give(generator, bits, bits)


def _tracked_objects() -> list[Any]:
    """Return all objects that the garbage collector tracks, with those that were frozen."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _give(generator: Any, bits: Any, given: Any) -> None:
    """Make `generator` draw from `given`, which stands for its bit generator `bits`."""
    reentrant = isinstance(bits.lock, type(threading.RLock()))  # else other threads may draw now
    with bits.lock if reentrant else contextlib.nullcontext():
        if isinstance(generator, np.random.Generator):
            generator.__init__(given)  # type: ignore[misc]
            return
        state = generator.get_state(legacy=False)
        generator.__init__(given)
        if state["has_gauss"]:  # the second number of a pair, which __init__ has dropped
            generator.set_state(state)


class _WatchedLock:
    """The lock of a bit generator; it looks whether numbers were drawn while it was held."""

    def __init__(self, draws: ForeignDraws, generator: object, bits: Any) -> None:
        self._draws = draws
        self._generator = generator
        self._bits = bits
        self._before: list[object] = []

    def __enter__(self) -> None:
        self._bits.lock.acquire()
        self._before.append(_flat(self._bits.state))

    def __exit__(self, *error: object) -> None:
        has_drawn = self._before.pop() != _flat(self._bits.state)
        self._bits.lock.release()
        if has_drawn:
            self._draws.note_numpy(self._generator, sys._getframe(1))


class _WatchedBits:
    """A bit generator in everything but its lock."""

    def __init__(self, bits: Any, lock: _WatchedLock) -> None:
        object.__setattr__(self, "own", (bits, lock))

    def __getattribute__(self, name: str) -> Any:
        bits, lock = object.__getattribute__(self, "own")
        return lock if name == "lock" else getattr(bits, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "own")[0], name, value)


def _flat(state: Any) -> object:
    """Return a bit generator's state as a value that can be compared."""
    if isinstance(state, dict):
        return [(key, _flat(value)) for key, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state
