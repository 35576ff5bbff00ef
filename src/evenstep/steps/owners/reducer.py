"""Reduces a step whose parameters have owners among the processes: each gets what it updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from safetensors.torch import load, save

from evenstep.collectives import assign_owners
from evenstep.distributed import Exchange
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import BUCKET_BYTES, NetworkReducer
from evenstep.distributed.owners.reduce import ReducerToOwners
from evenstep.distributed.owners.space import OwnerSpace
from evenstep.errors import ContractError, PeerError, text_of
from evenstep.shard.gradients import GradientStream
from evenstep.shard.partial_sum import Add
from evenstep.steps.reducer import ProcessReducer
from evenstep.steps.step import Attempt

READY, UPDATED = "its part of the update", "its updated parameters"
"""What processes wait for when they meet: before any of them updates, and after all have."""

_FAILURE = "failure"


class OwnerReducer(ProcessReducer):
    """Sums the gradient of each parameter in one process, its owner, and spreads its new value.

    Attributes:
        owner_of: the rank of each parameter's owner.
    """

    sums_everywhere = False

    def begin(self, attempt: Attempt, add: Add, *, may_stream: bool) -> GradientStream | None:
        """Give an attempt its tree; return what takes gradients during backward passes, if any."""
        if self.in_flight == 1:  # otherwise an update may still need them
            for parameter in self._home.parameters:
                parameter.grad = None
        return super().begin(attempt, add, may_stream=may_stream)

    def _lay_out(self) -> None:
        """Assign the parameters to the processes."""
        parameters = self._home.parameters
        self.owner_of = owners_of_parameters(parameters, self.peers.size)
        self._assigned = [*parameters]
        space = OwnerSpace(parameters, self._dense_numbers(), self.owner_of, BUCKET_BYTES)
        self._forms = _forms(parameters)
        self._dense = self._owned = ReducerToOwners(self.peers, space)

    def _reducer_of(self, flats: FlatSpace) -> NetworkReducer:
        """Return what sums gradients as sums to owners travel: not through shared memory."""
        return NetworkReducer(self.peers, flats, BUCKET_BYTES)

    def _follow_home(self) -> None:
        """Refuse other parameters than the assigned ones; other changes need nothing here."""
        self._home = self._replicas.home
        pairs = zip(self._assigned, self._home.parameters)  # noqa: B905
        same = len(self._assigned) == len(self._home.parameters) and all(a is b for a, b in pairs)
        if not same or self._forms != _forms(self._assigned):
            raise ContractError(
                "the model's parameters were replaced, or changed their shape, dtype or strides, "
                "while Layout(divide=Owners()) has assigned them to processes: save, change the "
                "model, and open a new trainer with Trainer.load"
            )

    def exchange(
        self,
        step: int,
        what: str,
        norms: Mapping[int, torch.Tensor],
        failure: BaseException | None = None,
    ) -> dict[int, torch.Tensor]:
        """Report how far this process is, or why it failed; return everyone's norms.

        Args:
            step: the step's number.
            what: what the others wait for.
            norms: the norm of each gradient of this process, by its parameter's number.
            failure: why this process can't go on; then no process does.

        Raises:
            PeerError: another process can't go on, or is lost.
        """
        text = b"" if failure is None else f"{type(failure).__name__}: {text_of(failure)}".encode()
        failed = {_FAILURE: torch.tensor([*text], dtype=torch.uint8)}
        message = save({**failed, **{str(i): norm.cpu() for i, norm in norms.items()}})
        exchange = Exchange("step", what, step)
        found: dict[int, torch.Tensor] = {}
        for rank, answer in enumerate(self.peers.gather(message, exchange)):
            tensors = load(answer)
            text = bytes(tensors.pop(_FAILURE).tolist())
            if text and rank != self.rank:
                raise self.peers.failed(rank, text.decode())
            found |= {int(i): norm for i, norm in tensors.items()}
        return found

    def spread(self, step: int, changed: Sequence[bool]) -> None:
        """Send the new values of this process's parameters to all others, and receive theirs.

        Args:
            step: the step's number.
            changed: whether each parameter had a gradient.

        Raises:
            PeerError: another process is lost.
        """
        try:
            self._owned.spread(self._home.parameters, changed)
        except PeerError as error:
            exchange = Exchange("step", "the new parameters", step)
            raise self.peers.explained(error, exchange) from error


def owners_of_parameters(parameters: Iterable[torch.Tensor], owners: int) -> list[int]:
    """Return the owner of each parameter, assigned by size.

    Frozen parameters count nothing: they have neither gradient nor optimizer state.
    """
    return assign_owners([one.nbytes if one.requires_grad else 0 for one in parameters], owners)


def _forms(parameters: Sequence[torch.Tensor]) -> list[object]:
    return [(one.shape, one.dtype, one.stride()) for one in parameters]
