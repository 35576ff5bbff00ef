"""The layout: how the work of a training is divided, which has no effect on its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from evenstep.devices import Device
from evenstep.engine import Lanes, ThreadLanes
from evenstep.errors import InputError, shown
from evenstep.options.checks import Options, check_flag

StageNames: TypeAlias = "Mapping[str, int] | str"
"""What `Stages` accepts: modules that begin a stage, by name; or "balanced"."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """The network divided among devices, each with one stage of it (a pipeline).

    With S stages, the devices r S to r S + S - 1 compute with one replica of the model. The shards
    are the micro-batches. Devices must be of one kind. On accelerators, the first one also holds
    the whole model.

    Attributes:
        names: the stage of each module that begins one, by the module's name, as in `{"features":
            0, "classifier": 1}`: what follows it in the order of `model.named_modules()` belongs to
            its stage, too, until the next module that is named. "balanced" for one stage on each
            device, or "balanced:2" for two stages, of equal numbers of bytes; "balanced:time" or
            "balanced:2:time" for equal times, measured on a shard before the first step, and kept
            in checkpoints.
    """

    names: StageNames = "balanced"

    def __repr__(self) -> str:
        return f"Stages({self.names!r})"


@dataclasses.dataclass(frozen=True)
class Slices:
    """Each shard divided among devices, which compute the slices of its `evenstep.nn` layers.

    A device with memory of its own holds its slices of the weights only.
    """


@dataclasses.dataclass(frozen=True)
class Owners:
    """The optimizer's state and its update divided among the processes (see docs/layouts.md).

    Each parameter has one owner, which alone keeps its summed gradient and its state, updates it,
    and sends the new value to all others. Optimizers whose update of a tensor reads other tensors
    are refused, as are layers with sparse gradients. `optimizer.state_dict()` then gathers the
    state of all: every process must call it, inside the `with`. `before_update` sees the gradients
    of the process's own parameters only; the others' are None.
    """


Division: TypeAlias = Stages | Slices | Owners


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Layout(Options):
    """How the work is divided among the devices; it has no effect on the result.

    Attributes:
        divide: `Stages(...)`, `Slices()`, `Owners()`, or a tuple of those that go together
            (`Owners()` with either of the others); empty where each device computes whole shards,
            and each process updates the whole model.
        side_by_side: compute all shards of a batch at the same time, so that they can call
            `evenstep.all_gather`, in one process only, as with `batch_norm="sync"`.
        tune_malloc: whether the C library's allocator keeps freed memory for the next step while
            the trainer is open.
        lanes: the class that runs the work: `ThreadLanes` starts threads for each device,
            `InlineLanes` runs everything in the calling thread.

    Raises:
        InputError: a value is of the wrong kind, or the same division is given twice.
    """

    divide: Division | tuple[Division, ...] = ()
    side_by_side: bool = False
    tune_malloc: bool = True
    lanes: Callable[[Sequence[Device]], Lanes] = ThreadLanes

    def __post_init__(self) -> None:
        kinds = [type(one) for one in self._divisions]
        if not all(kind in (Stages, Slices, Owners) for kind in kinds):
            raise InputError(
                f"got divide={shown(self.divide)}: give Stages(...), Slices() or Owners(), or a "
                f"tuple of them"
            )
        if len({*kinds}) < len(kinds):
            raise InputError(f"got divide={shown(self.divide)}: give each division once")
        check_flag("side_by_side", self.side_by_side)
        check_flag("tune_malloc", self.tune_malloc)
        if not callable(self.lanes):
            raise InputError(f"got lanes={shown(self.lanes)}: give a class such as ThreadLanes")

    @property
    def _divisions(self) -> tuple[Division, ...]:
        return self.divide if isinstance(self.divide, tuple) else (self.divide,)

    @property
    def stages(self) -> Stages | None:
        """The stages of the network; None where each device computes all of it."""
        return next((one for one in self._divisions if isinstance(one, Stages)), None)

    @property
    def has_slices(self) -> bool:
        """Whether all devices compute the slices of a shard together."""
        return any(isinstance(one, Slices) for one in self._divisions)

    @property
    def has_owners(self) -> bool:
        """Whether the optimizer is divided among the processes."""
        return any(isinstance(one, Owners) for one in self._divisions)
