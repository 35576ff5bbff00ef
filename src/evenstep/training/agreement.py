"""What the processes that train together must agree on, and when they compare it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn, optim

from evenstep.arithmetic import portable_facts
from evenstep.batch import Batch
from evenstep.checkpoint import fingerprint as fingerprints
from evenstep.checkpoint.optimizer_kind import kinds_of
from evenstep.checkpoint.training_state import ModelState, facts_of
from evenstep.contract import SelfCheck
from evenstep.contract.rehearsal import SentShard
from evenstep.devices import arithmetic_facts, hash_seed, instruction_facts, known_results
from evenstep.devices.facts import Facts
from evenstep.distributed.process_group import END
from evenstep.engine.interrupts import interruptible
from evenstep.errors import DivergedError, PeerError
from evenstep.replicas import layer_settings, optimizer_settings, plain_attributes
from evenstep.shard.loss import Loss
from evenstep.steps.groups.same_shard import Results
from evenstep.steps.step import Step
from evenstep.training.setup.arguments import Chosen
from evenstep.training.setup.parts import Parts


class Agreement:
    """Compares what processes train, and the states that they are in.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
        loss: the loss that the trainer was given.
        parts: the parts of the trainer's steps.
        chosen: experiment, devices, layout and faults.
        self_check: computes the shard that all processes compare.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        loss: Loss | None,
        parts: Parts,
        chosen: Chosen,
        self_check: SelfCheck,
    ) -> None:
        self._self_check = self_check
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._executor = parts.executor
        self._pipeline = parts.pipeline
        self._progress = parts.progress
        self._every = chosen.faults.check_every
        self._allow_rounding = chosen.faults.allow_rounding
        self._update = parts.update
        self._check = chosen.faults.check
        self._has_owners, self._split = chosen.layout.has_owners, parts.partition
        self._devices = parts.engine.devices
        self._is_portable = chosen.experiment.arithmetic == "portable"
        self._arithmetic = self._arithmetic_facts()
        self._results: dict[str, str] = {}
        self._began_at = self._compared_at = 0  # steps done

    def begin(self) -> None:
        """Note that the processes open their trainers, whose states are equal."""
        self._began_at = self._compared_at = self._steps_done
        self._arithmetic = self._arithmetic_facts()

    def compare_if_due(self) -> None:
        """Compare states before the next step, if that is due."""
        if self._steps_done == self._began_at + 1 or (self._steps_done > 0 and self._is_due):
            self.compare("step")

    def compare_at_end(self) -> None:
        """Compare states when the trainer is closed, unless that was done after the last step."""
        if self._steps_done != self._compared_at:
            self.compare(END)

    def compare(self, call: str, other: nn.Module | None = None) -> None:
        """Make sure that all processes are in the same state (a flipped bit would spread).

        Args:
            call: the trainer's method that compares them.
            other: a second model, which must be the same in all processes, too.

        Raises:
            DivergedError: a process is in a different state; the message names what differs first.
            PeerError: a process is lost.
            ClosedError: a step failed within its update.
        """
        group = self._executor.group
        if group.is_alone:
            return
        self._update.refuse_half_step()
        if group.differences:
            self._pipeline.finish()  # what is compared is written to
        else:
            self._pipeline.wait()
        self._compared_at = steps_done = self._steps_done
        interruptible(group.compare_states, self._state, steps_done, call)
        if other is not None:
            state = dict(other.state_dict())
            interruptible(group.compare_states, lambda: (state, {}), steps_done, call)

    def compare_results(self, step: Step, *, is_new: bool = False) -> None:
        """Make sure, where that is due, that all processes compute the same of the same shard.

        Args:
            step: a step that has not begun.
            is_new: whether no step was taken with its objective.

        Raises:
            ContractError: they don't; the message names what differs first.
            PeerError: a process is lost, or its code has failed.
        """
        check, executor = self._self_check, self._executor
        if not (is_new or check.is_due_everywhere(step.number, self._began_at)):
            return
        self._pipeline.wait()
        self._pipeline.follow_user()

        def compute(sent: SentShard) -> Results:
            return check.results_of(sent, step.objective, executor.check_limit_s)

        attempt = step.attempt
        interruptible(
            executor.group.refuse_other_results,
            step.number,
            attempt.cut,
            attempt.seed,
            compute,
            plain_attributes(self._model),
        )

    def compare_to_save(self) -> PeerError | None:
        """Compare states before a checkpoint; return the error if another process is lost.

        What this process has is worth a checkpoint then, too.
        """
        try:
            self.compare("save")
        except DivergedError:
            raise
        except PeerError as error:
            if error.rank is None:
                raise
            return error
        return None

    def digest_of(self, batch: Batch) -> int:
        """Return the digest of a step's batch, if the processes compare it."""
        return self._executor.group.digest_of(batch, is_due=self._is_due)

    def facts(self) -> Facts:
        """Return everything that processes compare when they open their trainers."""
        position = self._progress.position
        facts = {
            **self.resumed_facts(),
            "settings of the optimizer": optimizer_settings(self._optimizer),
            "options": {
                "allow_rounding": self._allow_rounding,
                "owners": self._has_owners,
                "check": self._check,
            },
            "values": {"the fingerprint of model and optimizer": self._fingerprint()},
            "place": {
                "the steps done": position.steps_done,
                "the place in the data": dataclasses.astuple(position.cursor),
                "the place of the seeds": dataclasses.astuple(position.seeds_at),
            },
        }
        del facts["optimizer"]  # its settings say more
        return facts

    def resumed_facts(self) -> dict[str, Mapping[str, Any]]:
        """Return everything that a resume compares, besides the data."""
        model, kinds = ModelState.of(self._model), kinds_of(self._optimizer)
        return {
            **facts_of(self._executor.experiment, model, kinds, hash_seed()),
            **self.saved_facts(),
        }

    def saved_facts(self) -> dict[str, dict[str, Any]]:
        """Return the facts that a checkpoint holds as such."""
        if not (self._is_portable or self._results):
            self._results = known_results(self._devices)
        loss = {"loss": self._loss_facts()} if isinstance(self._loss, nn.Module) else {}
        return {
            "layers": layer_settings("layer", self._model),
            "strides": _strides_of(self._model),
            **loss,
            "arithmetic": {**self._arithmetic, **self._results},
            "instructions": {} if self._is_portable else instruction_facts(),
        }

    def _arithmetic_facts(self) -> Mapping[str, str]:
        return portable_facts() if self._is_portable else arithmetic_facts(self._devices)

    @property
    def _steps_done(self) -> int:
        return self._progress.position.steps_done

    @property
    def _is_due(self) -> bool:
        """Whether what the next step is given is compared before it."""
        return self._steps_done % self._every == 0

    def _state(self) -> tuple[dict[str, object], dict[str, str]]:
        """Return tensors by name, and settings by name: what every process has."""
        read = fingerprints.common_state if self._has_owners else fingerprints.whole_state
        tensors = dict(read(self._model, self._optimizer))
        return tensors, {**optimizer_settings(self._optimizer), **self._frozen()}

    def _fingerprint(self) -> str:
        """Return the fingerprint of what every process has before the trainer is opened."""
        if self._split is not None and self._split.holds_part:
            return fingerprints.digest_of(fingerprints.common_state(self._model, self._optimizer))
        return fingerprints.fingerprint(self._model, self._optimizer)

    def _frozen(self) -> dict[str, str]:
        names = fingerprints.frozen_parameters(self._model)
        return {f"requires_grad of {name}": "False" for name in names}

    def _loss_facts(self) -> dict[str, str]:
        """Return the settings and the class weights of a loss that is a module."""
        assert isinstance(self._loss, nn.Module)
        weights = {
            f"the digest of loss {name}": fingerprints.tensor_digest(value)
            for name, value in self._loss.named_buffers()
        }
        return {**layer_settings("loss", self._loss), **weights}


def _strides_of(model: nn.Module) -> dict[str, str]:
    """Return the strides of the parameters and buffers that are not contiguous."""
    named = [*model.named_parameters(), *model.named_buffers()]
    dense = [(name, one) for name, one in named if one.layout is torch.strided]
    return {
        f"strides of {name}": str(one.stride()) for name, one in dense if not one.is_contiguous()
    }
