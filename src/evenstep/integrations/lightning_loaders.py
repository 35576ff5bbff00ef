"""The place in Lightning's loaders, and what they draw from, where a training resumes.

Lightning gives a loader the state that it had behind its last batch. Between two epochs that goes
wrong: torchdata's loader ends at once, which Lightning takes for a whole epoch, or Lightning does
not give the state at all, or begins the next epoch twice. In the middle of an epoch, a loader
without a length is a batch ahead. And the generators of a loader are not in its state, or not as
they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from evenstep.data import GeneratorStates
from evenstep.data.adapters.map_style import is_torchdatas
from evenstep.data.adapters.streams import has_own_state
from evenstep.data.generators import (
    Generator,
    generators_of,
    restore_states,
    samplers_of,
    states_of,
)
from evenstep.errors import InputError
from evenstep.private_torch.loaders import end_workers


def place_in(loop: Any) -> dict[str, Any]:
    """Return the default generators' states, and what Lightning doesn't save of its loaders."""
    loaders = _loaders_of(loop)
    held = [states_of(_held_by(loader)) for loader in loaders]
    has_place = any(map(has_own_state, loaders))
    ahead = [*getattr(loop._data_fetcher, "batches", ())] if has_place else []
    return {**GeneratorStates().state_dict(), "loaders": held, "ahead": ahead}


class Resumed:
    """A training that resumes where Lightning has saved a checkpoint.

    The fit loop has read the checkpoint; `place_in` returned `place`.
    """

    def __init__(self, loop: Any, place: Mapping[str, Any]) -> None:
        GeneratorStates().load_state_dict(place)
        self._loop = loop
        self._place = place
        self._is_at_end = loop.epoch_loop.batch_progress.is_last_batch
        self._states = [*loop._combined_loader_states_to_load]
        if self._is_at_end:
            loop._combined_loader_states_to_load = []
        elif self._states:
            loop._combined_loader = None  # made to count the steps, before the states were known

    def start(self) -> None:
        """Go to the place in the loaders, which Lightning has begun to iterate.

        Raises:
            InputError: they are others than those that were saved.
        """
        loop, loaders = self._loop, _loaders_of(self._loop)
        if self._is_at_end:
            self._give_states([one for one in loaders if has_own_state(one)])
        elif self._states:
            _refuse_counts(loaders)
            if hasattr(loop._data_fetcher, "batches"):
                loop._data_fetcher.batches[:0] = self._place.get("ahead", [])
        self._restore(loaders)
        if (
            self._is_at_end and not loop.epoch_loop.restarted_on_last
        ):  # else Lightning does so later
            iter(loop._data_fetcher)

    def _give_states(self, loaders: list[Any]) -> None:
        if len(loaders) != len(self._states):
            raise InputError(
                f"got {len(loaders)} loaders that have a state, but the checkpoint has "
                f"{len(self._states)} states: give the loaders that were saved"
            )
        for loader, state in zip(loaders, self._states, strict=True):
            _begin_behind(loader, state)

    def _restore(self, loaders: list[Any]) -> None:
        saved = self._place.get("loaders")
        held = [*map(_held_by, loaders)]
        if saved is not None:
            if [*map(len, saved)] != [*map(len, held)]:
                raise InputError(
                    f"the loaders hold {sum(map(len, held))} random generators, but those of the "
                    f"checkpoint {sum(map(len, saved))}: give the loaders that were saved"
                )
            for generators, states in zip(held, saved, strict=True):
                restore_states(generators, states)
        GeneratorStates().load_state_dict(self._place)


def _begin_behind(loader: Any, state: Any) -> None:
    """Give a loader the state of an epoch's end, so that its next iteration is the next epoch."""
    loader.load_state_dict(state)
    if is_torchdatas(loader):
        end_workers(loader._get_iterator())


def _refuse_counts(loaders: list[Any]) -> None:
    """Refuse a place in torchdata's loader that only counts batches, and loses some."""
    for loader in filter(is_torchdatas, loaders):
        fetcher = getattr(loader._iterator, "_dataset_fetcher", None)
        parts = loader.dataset, getattr(fetcher, "dataset_iter", None)
        if isinstance(loader.dataset, IterableDataset) and not any(map(has_own_state, parts)):
            raise InputError(
                f"the data set {type(loader.dataset).__name__} has no state, so the checkpoint "
                f"only has the number of batches that its StatefulDataLoader has given: give it "
                f"state_dict and load_state_dict, or resume at the end of an epoch"
            )


def _loaders_of(loop: Any) -> list[Any]:
    return [] if loop._combined_loader is None else [*loop._combined_loader.flattened]


def _held_by(loader: Any) -> list[Generator]:
    """Return the generators that a loader holds."""
    if not isinstance(loader, DataLoader):
        return [*generators_of(loader)[3:]]
    return [*generators_of(loader.generator, *samplers_of(loader), loader.dataset)[3:]]
