"""Chooses the parts that a trainer's steps are made of, once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from evenstep.arithmetic import within
from evenstep.callbacks import Callback
from evenstep.devices import StagedDevice
from evenstep.engine import Engine
from evenstep.profiling.clock import Timekeeper
from evenstep.replicas import OptimizerProxy, Replicas
from evenstep.stages.carried import Crossing
from evenstep.stages.executor import StagedExecutor
from evenstep.stages.plan import StagePlan
from evenstep.steps.executors import IndependentExecutor, LockstepExecutor, SlicedExecutor
from evenstep.steps.executors.lost_devices import LostDevices
from evenstep.steps.groups.group import Group
from evenstep.steps.in_flight.outside import OutsideValues
from evenstep.steps.in_flight.overlapped_pipeline import OverlappedPipeline
from evenstep.steps.in_flight.proxy_update import ProxyUpdate
from evenstep.steps.left_gradients import LeftGradients
from evenstep.steps.minimise import Minimiser, minimises
from evenstep.steps.owners.partition import Partition
from evenstep.steps.owners.update import OwnedProxyUpdate, OwnedUpdate
from evenstep.steps.pipeline import DirectPipeline, Pipeline
from evenstep.steps.step import Progress
from evenstep.steps.update import Hook, Update
from evenstep.training.evaluation.other_model import OtherValues
from evenstep.training.reporting import Reporter, Take
from evenstep.training.setup.arguments import Chosen
from evenstep.training.setup.combinations import holders, lane_devices, shards_at_once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a trainer's steps.

    Attributes:
        progress: how far the training is.
        engine: runs tasks on the devices.
        replicas: the replicas of the model.
        timekeeper: the times of steps.
        executor: computes the shards of a batch; `executor.group` has the other processes.
        update: ends a step.
        pipeline: the steps in flight.
        values: of other models, evaluated in the place of the user's.
        left: the gradients that `Trainer.backward` has left to the user.
        reporter: calls the callbacks.
        take: begins a step and reports it.
        partition: splits the optimizer by owners; None if it is whole everywhere.
    """

    progress: Progress
    engine: Engine
    replicas: Replicas
    timekeeper: Timekeeper
    executor: IndependentExecutor
    update: Update
    pipeline: Pipeline
    values: OtherValues
    left: LeftGradients
    reporter: Reporter
    take: Take
    partition: Partition | None = None


def choose_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: object,
    chosen: Chosen,
    hooks: tuple[Hook | None, Hook | None],
    callbacks: Sequence[Callback],
    stages: StagePlan | None = None,
) -> Parts:
    """Return the parts for what was chosen.

    Args:
        model: the user's model, on the first device.
        optimizer: the user's optimizer.
        loss: the user's loss or objective.
        chosen: experiment, devices, layout and faults.
        hooks: `before_update` and `after_update`.
        callbacks: the user's.
        stages: the stages of the network; None where each device computes all of it.
    """
    experiment, devices, layout = chosen.experiment, chosen.devices, chosen.layout
    lanes = lane_devices(chosen, stages)
    mode = Crossing if isinstance(lanes[0], StagedDevice) else within(experiment.arithmetic)
    engine = Engine(lanes, lanes=layout.lanes, within=mode)
    progress = Progress()
    names = [device.name for device in devices]
    timekeeper = Timekeeper(engine.trace, names)
    replicas = Replicas(
        model,
        holders(chosen, stages),
        home_computes=not (chosen.overlaps or stages),
        in_flight=chosen.overlaps,
        per_device=stages.count if stages else shards_at_once(chosen),
        buffers=experiment.buffers,
        stages_of=stages.of_modules if stages else None,
    )
    make_executor: Callable[..., IndependentExecutor]
    make_executor = LockstepExecutor if chosen.is_lockstep else IndependentExecutor
    if layout.has_slices:
        make_executor = SlicedExecutor
    if stages is not None:
        make_executor = functools.partial(StagedExecutor, stages=stages)
    group = Group(experiment.batch_dim)
    lost = LostDevices(engine, replicas, chosen.faults.lost_after_s)
    executor = make_executor(experiment, replicas, engine, timekeeper, group, lost)
    update = _choose_update(optimizer, replicas, loss, chosen, hooks, callbacks)
    update.arithmetic = experiment.arithmetic
    kinds = {(device.kind, device.threads) for device in devices}
    direct = kinds == {("cpu", experiment.threads)} and not chosen.overlaps
    pipeline = (DirectPipeline if direct else OverlappedPipeline)(
        executor,
        update,
        timekeeper,
        progress,
        max_in_flight=chosen.max_in_flight,
    )
    partition = None
    if isinstance(update, OwnedUpdate):
        partition = Partition(model, optimizer, update, pipeline)
    reporter = Reporter(callbacks, optimizer, pipeline, timekeeper, names)
    take = pipeline.submit
    if minimises(optimizer):
        take = Minimiser(optimizer, executor, update, pipeline, progress).take
    return Parts(
        progress=progress,
        engine=engine,
        replicas=replicas,
        timekeeper=timekeeper,
        executor=executor,
        update=update,
        pipeline=pipeline,
        values=OtherValues(model),
        left=LeftGradients(replicas, progress),
        reporter=reporter,
        take=reporter.watching(take),
        partition=partition,
    )


def _choose_update(
    optimizer: torch.optim.Optimizer,
    replicas: Replicas,
    loss: object,
    chosen: Chosen,
    hooks: tuple[Hook | None, Hook | None],
    callbacks: Sequence[Callback],
) -> Update:
    clip_norm = chosen.experiment.clip_norm
    if clip_norm is None and any(one.grad_norm for one in callbacks):
        clip_norm = math.inf  # which only measures it
    if chosen.overlaps:
        proxy = OptimizerProxy(optimizer)
        make_proxied = OwnedProxyUpdate if chosen.layout.has_owners else ProxyUpdate
        outside = OutsideValues(replicas.home.module, loss, hooks)
        update = make_proxied(optimizer, replicas, *hooks, clip_norm, proxy, outside)
        if minimises(optimizer):  # it steps itself, at once
            update.record = tuple
        return update
    make = OwnedUpdate if chosen.layout.has_owners else Update
    return make(optimizer, replicas, *hooks, clip_norm)
