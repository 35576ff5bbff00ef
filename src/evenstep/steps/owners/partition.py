"""The optimizer's state and update, split by owners: `Layout(divide=Owners())`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from evenstep.checkpoint import fingerprint as fingerprints
from evenstep.checkpoint.codec import Encoded, encode
from evenstep.checkpoint.owned_state import digest_over, gathered
from evenstep.checkpoint.owner_files import write_by_owners
from evenstep.checkpoint.training_state import TrainingState
from evenstep.distributed import Exchange, job_share
from evenstep.errors import ClosedError, InputError, ModelError
from evenstep.steps.groups.group import Group
from evenstep.steps.owners.reducer import OwnerReducer, owners_of_parameters
from evenstep.steps.owners.separate_updates import refuse_coupled
from evenstep.steps.owners.update import OwnedUpdate
from evenstep.steps.pipeline import Pipeline
from evenstep.steps.reducer import sparse_parameters

OPTION = "Layout(divide=Owners())"


class Partition:
    """Splits an optimizer by owners while a trainer is open.

    The user's optimizer holds the state of the parameters that this process owns. Asked for its
    `state_dict`, it gathers that of all.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
        update: ends steps.
        pipeline: the steps in flight.

    Raises:
        InputError: the model or the optimizer don't allow it; nothing was changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        update: OwnedUpdate,
        pipeline: Pipeline,
    ) -> None:
        _refuse_sparse(model)
        refuse_coupled(optimizer)
        self._model = model
        self._optimizer = optimizer
        self._update = update
        self._pipeline = pipeline
        self._owners: OwnerReducer | None = None
        self._was_split = False
        self._reads_own = False
        self._loaded: list[int] = []
        self._check_loaded: Callable[[str], None] | None = None

    @property
    def holds_part(self) -> bool:
        """Whether the optimizer holds a part of the state since a checkpoint was loaded."""
        return self._check_loaded is not None

    def note_loaded(self, check: Callable[[str], None]) -> None:
        """Note that this process has loaded only what it will own.

        Args:
            check: compares the fingerprint of the whole state with the saved one.
        """
        self._check_loaded = check
        self._loaded = owners_of_parameters(self._model.parameters(), job_share()[1])
        self._refusal = self._optimizer.register_state_dict_pre_hook(_refuse_loaded)

    @property
    def is_split(self) -> bool:
        """Whether other processes hold a part of the optimizer's state now."""
        return self._owners is not None

    def refuse_again(self) -> None:
        """Refuse to open a trainer whose processes have split the state before.

        Raises:
            ClosedError: the parts that other processes held are not here.
        """
        if self._was_split:
            raise ClosedError(
                f"with {OPTION} a trainer of several processes can be opened once, because each "
                f"keeps only its part of the optimizer's state: save before the end of `with`, and "
                f"resume with Trainer.load"
            )

    @contextlib.contextmanager
    def split(self, group: Group) -> Iterator[None]:
        """Inside `with`, let each of several processes keep the state of its own parameters."""
        if not isinstance(group.reducer, OwnerReducer):
            yield
            return
        owners, optimizer = group.reducer, self._optimizer
        if self._check_loaded is not None and self._loaded != owners.owner_of:
            raise InputError(
                "requires_grad of some parameters was changed after Trainer.load, so their "
                "optimizer state belongs to other processes: change it in the `with`"
            )
        self._was_split = True
        for owner, parameter in zip(owners.owner_of, self._model.parameters(), strict=True):
            if owner != owners.rank:
                optimizer.state.pop(parameter, None)
        self._owners = self._update.owners = owners
        if self._check_loaded is not None:
            self._refusal.remove()
            self._check_loaded(self.fingerprint())
            self._check_loaded = None
        before = optimizer.register_state_dict_pre_hook(self._wait)
        after = optimizer.register_state_dict_post_hook(self._whole)
        try:
            yield
        finally:
            self._owners = self._update.owners = None
            before.remove()
            after.remove()
            optimizer.register_state_dict_pre_hook(_refuse_part)

    @contextlib.contextmanager
    def _reading_own(self) -> Iterator[None]:
        """Inside `with`, the optimizer's `state_dict` has the state of this process only."""
        self._reads_own = True
        try:
            yield
        finally:
            self._reads_own = False

    def fingerprint(self, version: int = 1) -> str:
        """Return the fingerprint of the whole training state; each process must call this."""
        self._update.refuse_half_step()
        if self._owners is None:
            if self._was_split:
                _refuse_part(self._optimizer)
            if self.holds_part:
                _refuse_loaded(self._optimizer)
            compute = fingerprints.fingerprint if version == 1 else fingerprints.fingerprint_2
            return compute(self._model, self._optimizer)
        read = fingerprints.named_state if version == 1 else fingerprints.whole_state
        read = read if self._owners.rank == 0 else fingerprints.owned_state
        exchange = Exchange("fingerprint", "the optimizer's state")
        return digest_over(self._owners.peers, read(self._model, self._optimizer), exchange)

    def save(
        self,
        folder: Path,
        step: int,
        read: Callable[[], TrainingState],
        keep: int,
        *,
        background: bool,
    ) -> Path:
        """Save a checkpoint of which each process writes what it owns; each must call this.

        Args:
            folder: the folder of this training's checkpoints.
            step: the number of steps done.
            read: returns the training state, with this process's part of the optimizer's.
            keep: the number of checkpoints that are kept.
            background: as for `Trainer.save`.

        Raises:
            InputError: it was asked for in the background.
            SaveError: it could not be written; earlier ones are unchanged.
        """
        assert self._owners is not None
        if background:
            raise InputError(
                f"got background=True, but with {OPTION} and several processes a checkpoint is "
                f"written while they wait: leave background out"
            )
        peers, fingerprint = self._owners.peers, self.fingerprint()

        def encoded() -> Encoded:
            with self._reading_own():
                state = dataclasses.replace(read(), fingerprint=fingerprint)
            own = {"optimizer": {"state": state.optimizer["state"]}}
            return encode(state.to_tree() if peers.rank == 0 else own)

        return write_by_owners(peers, folder, encoded, step=step, keep=keep)

    def _wait(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._reads_own:
            self._pipeline.finish()
            self._update.refuse_half_step()

    def _whole(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Add what other processes hold to a state dict: a hook of the optimizer."""
        if self._reads_own or self._owners is None:
            return None
        state = state_dict["state"]
        own = {key: value for key, value in state.items() if isinstance(key, int)}
        others = {key: value for key, value in state.items() if not isinstance(key, int)}
        exchange = Exchange("optimizer.state_dict", "the optimizer's state")
        return {**state_dict, "state": {**gathered(self._owners.peers, own, exchange), **others}}


def state_of_others(model: nn.Module, optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the parameters that other processes will own, by the optimizer's numbers.

    Empty in a process that trains alone.
    """
    rank, size = job_share()
    if size == 1:
        return frozenset()
    owners = dict(
        zip(model.parameters(), owners_of_parameters(model.parameters(), size), strict=True)
    )
    held = [one for group in optimizer.param_groups for one in group["params"]]
    return frozenset(n for n, one in enumerate(held) if owners.get(one, rank) != rank)


def refuse_backward() -> NoReturn:
    """Refuse `Trainer.backward`, whose caller updates parameters that belong to others."""
    raise InputError(
        f"trainer.backward leaves the update to you, but with {OPTION} each process has only the "
        f"gradients of the parameters that it owns: call trainer.step, or leave it out"
    )


def _refuse_part(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise ClosedError(
        f"the optimizer's state was split over processes by {OPTION}, and the trainer that could "
        f"gather it is closed: call state_dict, fingerprint or save before the end of its `with`"
    )


def _refuse_loaded(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise ClosedError(
        f"with {OPTION} this process has loaded only the optimizer state that it will own: open "
        f"the trainer first, which can gather the state of all"
    )


def _refuse_sparse(model: nn.Module) -> None:
    sparse = sparse_parameters(model)
    for number, (name, _) in enumerate(model.named_parameters()):
        if number in sparse:
            raise ModelError(
                f"{name} belongs to a layer with sparse=True, whose gradients {OPTION} can't bring "
                f"to an owner: make the layer with sparse=False, or leave it out"
            )
