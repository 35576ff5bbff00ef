"""The part of Lightning's strategy that is evenstep's, for `lightning` and `pytorch_lightning`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evenstep.batch.cut import count_examples
from evenstep.batch.nesting import nest
from evenstep.devices import Devices, find_devices, intra_op_threads
from evenstep.distributed import job_share
from evenstep.errors import ContractError, InputError, add_note
from evenstep.integrations.lightning_loaders import Resumed, place_in
from evenstep.integrations.lightning_shards import ShardSteps
from evenstep.integrations.options import options_for, refuse_other_experiment
from evenstep.options import Experiment, Faults, Layout
from evenstep.steps.step import Position
from evenstep.training.setup.arguments import refined
from evenstep.training.trainer import Trainer

logger = logging.getLogger("evenstep")

_STRATEGY: Any = object  # Lightning's own strategy is the next base class
_INSTEAD = {
    "clip_norm": "use Lightning's Trainer(gradient_clip_val=...)",
    "compile": "leave it out: shards are computed eagerly",
    "divide": "leave it out: each device computes whole shards",
}
_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16"}
_ONE_PROCESS = "start one process, which uses all devices"
_SAVED = "evenstep"  # the key in Lightning's checkpoints
_NOTE = (
    "EvenStrategy calls training_step for each shard: it must return the mean loss over the "
    "shard's examples, or {'loss': loss, 'count': n} for a mean over n of something else"
)


class EvenSteps(_STRATEGY):  # type: ignore[misc]
    """A strategy of Lightning that trains on every device, with one result.

        trainer = lightning.Trainer(strategy=EvenStrategy(devices="auto"), max_epochs=3)
        trainer.fit(module, loader)

    The loop, hooks, callbacks, loggers, schedules, clipping and checkpoints are Lightning's. Only
    the gradients of a batch are evenstep's: the same bits on any devices. `training_step` is called
    once for each shard, with a part of the batch, on the module or a copy of it. It returns the
    mean loss over its examples, or a dict with this "loss". If the loss is a mean over something
    else, such as the tokens that are not padding, the dict also has their number as "count". Other
    values in the dict are numbers or tensors with a row for each example; `on_train_batch_end` gets
    the mean of the numbers over the examples, and the rows of the whole batch.

    `self.log` takes numbers. Those of the shards are merged before Lightning gets them: by
    `reduce_fx`, a mean weighted with `batch_size` (by default the shard's examples). Validation,
    test and prediction run on the first device.

    A checkpoint also contains what the next step's random layers are seeded from, and the states of
    the default generators. So `ckpt_path` resumes with the bits of an uninterrupted training, on
    other devices too: at the end of an epoch, or within one if the loader has a state.

    Args:
        devices: as for `evenstep.Trainer`. Leave out Lightning's `devices` and `accelerator`.
        shards: V, the number of shards that each batch is cut into; by default 8.
        seed: the seed of the random layers; by default 0.
        experiment: as for `evenstep.Trainer`; the precision is Lightning's: "32-true" or
            "bf16-mixed".
        layout: as for `evenstep.Trainer`.
        faults: as for `evenstep.Trainer`.

    Raises:
        InputError: an argument, or one of Lightning's Trainer, can't be used with evenstep.
    """

    def __init__(
        self,
        devices: Devices = "auto",
        *,
        shards: int | None = None,
        seed: int | None = None,
        experiment: Experiment | None = None,
        layout: Layout | None = None,
        faults: Faults | None = None,
    ) -> None:
        chosen, layout, faults = options_for("EvenStrategy", experiment, layout, faults, _INSTEAD)
        if job_share()[1] > 1:
            raise InputError(f"EvenStrategy got several processes: {_ONE_PROCESS}")
        self._chosen = refined(chosen, shards=shards, seed=seed)
        self._layout, self._faults = layout, faults
        self._threads = chosen.threads
        self._even_devices = find_devices(devices, threads=self._threads)
        super().__init__(device=self._even_devices[0].torch_device)
        self.parallel_devices = [self.root_device]  # Lightning chooses its accelerator by it
        self.num_nodes = 1  # Lightning's Trainer sets these three
        self.cluster_environment: Any = None
        self._layer_sync: Any = None
        self._batches_done = 0
        self._experiment: dict[str, Any] = {}  # of the training, known from its first step on
        self._begin()

    def _begin(self) -> None:
        self._even: Trainer | None = None
        self._opened = contextlib.ExitStack()
        self._shards: ShardSteps | None = None
        self._resumed: Resumed | None = None

    # ---- what Lightning calls

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, after a look at the settings."""
        if trainer.state.fn == "fit":
            self._refuse_settings(trainer)
            self._shards = ShardSteps(trainer)
        super().setup(trainer)

    def on_train_start(self) -> None:
        """Continue as Lightning does; the first batch comes from the place that was saved."""
        super().on_train_start()
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            resumed.start()

    def teardown(self) -> None:
        """Stop the threads of all devices, and tear down as Lightning does."""
        opened = self._opened
        self._begin()
        try:
            opened.close()
        finally:
            super().teardown()

    def training_step(self, batch: Any, *given: Any) -> dict[str, Any]:
        """Compute the batch's gradients on all devices; `backward` adds them to the parameters'.

        Returns:
            The batch's mean loss as "loss", and what the module's `training_step` returns besides.
        """
        module, shards = self.lightning_module, self._shards
        assert shards is not None
        dim = self._chosen.batch_dim
        rows = torch.arange(count_examples(nest(batch), dim))
        parameters = [*module.parameters()]
        before = [parameter.grad for parameter in parameters]
        with intra_op_threads(self._threads), shards.attached(module):
            even, done = self._open(module, shards), self._batches_done
            even.position = Position(steps_done=done, batch=done)
            try:
                handle = even.backward(batch, *given, rows)
            except ContractError as error:
                add_note(error, _NOTE)
                raise
        self._batches_done = even.steps_done
        gradients = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        loss = torch.tensor(float(handle), device=self.root_device, requires_grad=True)
        loss.register_hook(functools.partial(_add_gradients, parameters, gradients))
        returned = shards.merged(module, handle.outputs)
        to_root = functools.partial(torch.as_tensor, device=self.root_device)
        return {"loss": loss, **{name: to_root(value) for name, value in returned.items()}}

    def backward(self, *args: Any, **named: Any) -> Any:
        """Add the gradients that `training_step` has computed, between Lightning's hooks."""
        with intra_op_threads(self._threads):
            return super().backward(*args, **named)

    def optimizer_step(self, *args: Any, **named: Any) -> Any:
        """Update as Lightning does; norms must not depend on the machine's number of cores."""
        with intra_op_threads(self._threads):
            return super().optimizer_step(*args, **named)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **named: Any) -> None:
        """Save as Lightning does, with what the random layers of the next step follow from."""
        checkpoint[_SAVED] = {
            "batches_done": self._batches_done,
            "random": place_in(self.lightning_module.trainer.fit_loop),
            "experiment": self._experiment,
        }
        super().save_checkpoint(checkpoint, *args, **named)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what `save_checkpoint` has saved; of a plain checkpoint, the number of steps."""
        super().load_optimizer_state_dict(checkpoint)
        saved = checkpoint.get(_SAVED)
        if saved is None:
            logger.warning("the checkpoint was not saved by EvenStrategy: training resumes from it")
            self._batches_done = checkpoint["global_step"]
            return
        self._batches_done, self._experiment = saved["batches_done"], saved["experiment"]
        self._resumed = Resumed(self.lightning_module.trainer.fit_loop, saved["random"])

    # ---- the parts of a training step

    def _open(self, module: nn.Module, shards: ShardSteps) -> Trainer:
        """Start the threads of all devices, in the first step or after a change of optimizer."""
        optimizer = self.optimizers[0]
        if self._even is not None and self._even.optimizer is optimizer:
            return self._even
        self._opened.close()
        even = Trainer(
            module,
            optimizer,
            objective=shards,
            devices=self._even_devices,
            precision=_PRECISIONS[self.precision_plugin.precision],  # type: ignore[arg-type]
            experiment=self._chosen,
            layout=self._layout,
            faults=self._faults,
        )
        refuse_other_experiment("EvenStrategy", even.experiment, "the checkpoint", self._experiment)
        self._experiment = dataclasses.asdict(even.experiment)
        self._even = self._opened.enter_context(even)
        return even

    def _refuse_settings(self, trainer: Any) -> None:
        """Refuse settings of Lightning that take the step out of evenstep's hands."""
        module: Any = self.lightning_module
        precision = getattr(self.precision_plugin, "precision", type(self.precision_plugin))
        asked = getattr(trainer._accelerator_connector, "_devices_flag", 1)
        all_here = [*range(self.accelerator.auto_device_count())]
        refused = {
            "a module with automatic_optimization=False": (
                not module.automatic_optimization,
                "use evenstep.Trainer, whose trainer.backward leaves the updates to you",
            ),
            "a module compiled by torch.compile": (
                module._compiler_ctx is not None,
                "give the module itself, without torch.compile",
            ),
            "a training_step(dataloader_iter)": (
                "dataloader_iter" in inspect.signature(module.training_step).parameters,
                "write training_step(batch, batch_idx)",
            ),
            f"devices={asked}": (
                asked not in (1, [0], [self.root_device.index], all_here),
                "leave it out, and give EvenStrategy(devices=...)",
            ),
            f"num_nodes={self.num_nodes}": (self.num_nodes > 1, "leave it out"),
            "several processes": (self.cluster_environment.world_size() > 1, _ONE_PROCESS),
            f"precision={precision!r}": (
                precision not in _PRECISIONS,
                "use '32-true' or 'bf16-mixed'",
            ),
            "sync_batchnorm=True": (
                self._layer_sync is not None,
                "use Experiment(batch_norm='sync')",
            ),
        }
        for what, (is_asked_for, instead) in refused.items():
            if is_asked_for:
                raise InputError(f"EvenStrategy got {what}: {instead}")


def _add_gradients(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor | None],
    scale: torch.Tensor,
) -> None:
    """Add a loss's gradients, scaled as Lightning has scaled the loss: a hook of its tensor."""
    is_scaled = scale.item() != 1
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            gradient = gradient * scale if is_scaled else gradient
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
