"""Hugging Face's Trainer, with steps that evenstep computes on all devices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from evenstep.batch.own_shards import Shards
from evenstep.devices import Devices, find_devices, intra_op_threads
from evenstep.errors import ContractError, InputError, add_note
from evenstep.files import write_file
from evenstep.integrations.options import options_for, refuse_other_experiment
from evenstep.options import Experiment, Faults, Layout
from evenstep.shard.loss import Number
from evenstep.steps.step import Position, StepLoss
from evenstep.training.setup.arguments import refined
from evenstep.training.trainer import Trainer

try:
    import transformers
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    raise ImportError(
        "evenstep.integrations.transformers needs transformers: pip install "
        "'evenstep[transformers]'"
    ) from error

logger = logging.getLogger("evenstep")

_EXPERIMENT = "evenstep.json"  # in a checkpoint: what the result depends on
_IGNORED = -100  # the label of what doesn't count, in all of transformers
_NOTE = (
    "EvenTrainer calls compute_loss for each shard and weighs its mean with the number of labels "
    "that count: for a mean over something else, define loss_count(self, inputs), with class "
    "weights `return weight[inputs['labels']].sum()`; options={'separable': False} accepts any"
)
_INSTEAD = {
    "clip_norm": "use TrainingArguments(max_grad_norm=...)",
    "compile": "leave it out: shards are computed eagerly",
    "batch_dim": "leave it out: transformers puts examples first",
    "divide": "leave it out: each device computes whole shards",
}


class EvenTrainer(transformers.Trainer):
    """A `transformers.Trainer` that trains on every device, with one result.

        trainer = EvenTrainer(model=model, args=args, train_dataset=data, devices="auto")
        trainer.train()

    The loop, the optimizer, its schedule, clipping, callbacks, logs and checkpoints are those of
    transformers. Only the gradients of a batch are evenstep's: the same bits on any devices. They
    are, to rounding, those that `transformers.Trainer` computes on one device. With
    `gradient_accumulation_steps` above 1 the micro-batches are the shards of a step; otherwise each
    batch is cut into `shards`. A batch has `per_device_train_batch_size` examples, however many
    devices there are.

    Random layers are seeded from `args.seed`, the step and the shard. So `resume_from_checkpoint`
    continues with the bits of an uninterrupted training, on other devices too.

    Args:
        args: as for `transformers.Trainer`, in its order.
        devices: as for `evenstep.Trainer`; the first one must be that of the training arguments.
        shards: V, the number of shards of a batch; by default 8, or the number of micro-batches.
        experiment: as for `evenstep.Trainer`; the seed is that of the training arguments.
        layout: as for `evenstep.Trainer`.
        faults: as for `evenstep.Trainer`.
        named: as for `transformers.Trainer`.

    Raises:
        InputError: an argument, or a training argument, can't be used with evenstep.
    """

    def __init__(
        self,
        *args: Any,
        devices: Devices = "auto",
        shards: int | None = None,
        experiment: Experiment | None = None,
        layout: Layout | None = None,
        faults: Faults | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        chosen, self._layout, self._faults = options_for(
            "EvenTrainer", experiment, layout, faults, _INSTEAD
        )
        self._experiment = refined(chosen, shards=shards)
        self._refuse_settings()
        self.args._n_gpu = 1  # a batch is that of one device, and nothing is wrapped
        self._train_batch_size = self.args.train_batch_size
        self._threads = self._experiment.threads
        self._devices = find_devices(devices, threads=self._threads)
        self._refuse_other_device()
        self._shards = self._shards_of_step()
        self._even: Trainer | None = None
        self._opened = contextlib.ExitStack()
        self._micro_batches: list[dict[str, Any]] = []
        self._sums = False
        self._resumed_from: str | bool | None = None
        self._callers_threads: int | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **named: Any
    ) -> Any:
        """Train, as `transformers.Trainer.train`; threads run on all devices until it returns.

        Raises:
            InputError: the checkpoint is of a different experiment, such as one with other shards.
        """
        self._callers_threads = torch.get_num_threads()
        self._even, self._micro_batches = None, []
        self._resumed_from = resume_from_checkpoint
        try:  # norms and updates must not depend on the machine's number of cores
            with intra_op_threads(self._threads), contextlib.ExitStack() as self._opened:
                return super().train(resume_from_checkpoint, *args, **named)
        finally:
            self._even = self._callers_threads = None

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """Evaluate, as `transformers.Trainer.evaluation_loop`, with the caller's threads."""
        with intra_op_threads(self._callers_threads or torch.get_num_threads()):
            return super().evaluation_loop(*args, **named)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Collect a micro-batch; with the last one of an update, compute the gradients of all.

        Returns:
            The mean loss of the update's micro-batches; zero before the last one.
        """
        model.train()
        if callable(to_train := getattr(self.optimizer, "train", None)):  # of optimizers with modes
            to_train()
        self._micro_batches.append(dict(self._prepare_inputs(inputs)))
        if len(self._micro_batches) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        batches, self._micro_batches = self._micro_batches, []
        if self._even is None:
            self._even = self._open(model, batches[0], num_items_in_batch)
        if self.args.gradient_accumulation_steps == 1:
            loss = self._backward_of_rows(self._even, batches[0])
        else:
            items = None if num_items_in_batch is None else float(num_items_in_batch)
            micro_batches = [(batch, items, len(batches)) for batch in batches]
            loss = self._even.backward(Shards(micro_batches), accumulate=True)
        return torch.tensor(float(loss), device=self.args.device)

    def _backward_of_rows(self, even: Trainer, batch: dict[str, Any]) -> StepLoss:
        """Compute the gradients of a batch, which is cut into shards."""
        try:
            return even.backward(batch, accumulate=True)
        except ContractError as error:
            add_note(error, _NOTE)
            raise

    def loss_count(self, inputs: Mapping[str, Any]) -> Number:
        """Return what the mean of `compute_loss` is over, for some rows of a batch.

        By default the number of labels that aren't -100; of answers (`start_positions`), those that
        lie inside the text; without either, that of examples. Define it in a class of your own for
        a different mean: with class weights, `weight[labels].sum()`.

        Raises:
            InputError: a shard has answers whose start counts, and whose end does not.
        """
        labels = inputs.get("labels")
        if not isinstance(labels, torch.Tensor):
            answers = _counted_answers(inputs, is_whole=self._shards == 1)
            return len(next(_tensors_of(inputs))) if answers is None else answers
        if getattr(self, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        return labels.ne(_IGNORED).sum()

    def _open(
        self, model: nn.Module, inputs: dict[str, Any], items: torch.Tensor | int | None
    ) -> Trainer:
        """Start the threads of all devices; `train` stops them."""
        accumulates = self.args.gradient_accumulation_steps > 1
        self._sums = items is not None and self._divides_by_items(model, inputs)
        if accumulates and not self._sums and self._counts_as_scaled(items):
            logger.warning(
                f"the loss of {type(model).__name__} is not wholly divided by num_items_in_batch: "
                f"transformers adds those of {self.args.gradient_accumulation_steps} micro-batches "
                f"without taking their mean, and so does EvenTrainer; set loss_is_scaled_for_ga = "
                f"False in a class of your own for the mean"
            )
        outer: Any = self.optimizer
        even = Trainer(
            model,
            getattr(outer, "optimizer", outer),  # accelerate's has torch's inside
            shards=self._shards,
            objective=self._of_micro_batch if accumulates else self._of_rows,
            devices=self._devices,
            seed=self.args.seed,
            experiment=self._experiment,
            layout=self._layout,
            faults=self._faults,
        )
        if self._resumed_from:
            folder = self._checkpoint()
            saved = _saved_experiment(folder)
            refuse_other_experiment("EvenTrainer", even.experiment, str(folder), saved)
        done = self.state.global_step
        even.position = Position(steps_done=done, batch=done)
        return self._opened.enter_context(even)

    def _save_checkpoint(self, *args: Any, **named: Any) -> None:
        """Save, as transformers does, and note the experiment beside it."""
        super()._save_checkpoint(*args, **named)
        if self._even is not None:
            folder = Path(self._get_output_dir(None), f"checkpoint-{self.state.global_step}")
            noted = json.dumps(dataclasses.asdict(self._even.experiment), indent=1)
            write_file(folder / _EXPERIMENT, noted.encode())

    def _checkpoint(self) -> Path:
        """Return the folder that training resumes from; transformers has found one there."""
        find_last: Any = get_last_checkpoint
        given: Any = self._resumed_from
        return Path(find_last(self.args.output_dir) if given is True else given)

    def _of_micro_batch(
        self, model: nn.Module, inputs: dict[str, Any], items: float | None, parts: int
    ) -> tuple[torch.Tensor, Number]:
        """Return what transformers adds for one of `parts` micro-batches: their sum is the loss."""
        loss = self._loss(model, inputs, items)
        return (loss * parts if self._counts_as_scaled(items) else loss), 1

    def _of_rows(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, Number]:
        """Return the sum over the counted labels of some rows of a batch, and their number."""
        if self._sums:
            items: Any = self._get_num_items_in_batch([inputs], _device_of(inputs))
            return self._loss(model, inputs, 1.0), items
        count = self.loss_count(inputs)
        if not count:  # a mean of nothing would be NaN
            return torch.zeros((), device=_device_of(inputs)), 0
        return self._loss(model, inputs, None) * count, count

    def _loss(self, model: nn.Module, inputs: dict[str, Any], items: float | None) -> torch.Tensor:
        counted = None if items is None else torch.tensor(items, device=_device_of(inputs))
        loss = self.compute_loss(model, dict(inputs), num_items_in_batch=counted)
        return cast(torch.Tensor, loss)

    def _counts_as_scaled(self, items: object) -> bool:
        """Whether transformers takes a micro-batch's loss as divided for the whole update."""
        given = getattr(self, "loss_is_scaled_for_ga", None)
        if given is not None:
            return bool(given)
        knows_items = self.model_accepts_loss_kwargs and items is not None
        return knows_items or self.compute_loss_func is not None

    def _divides_by_items(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether the loss is a sum divided by `num_items_in_batch`, and not a mean.

        Raises:
            InputError: it is neither, and the batch is to be cut.
        """
        device = self.args.device
        model.eval()
        with torch.no_grad(), _forked_generators(device):
            by_one, by_two = (float(self._loss(model, inputs, items)) for items in (1.0, 2.0))
        model.train()
        if math.isclose(by_one, 2 * by_two, rel_tol=1e-5):
            return True
        is_mean = math.isclose(by_one, by_two, rel_tol=1e-5) or math.isnan(by_one)
        if not is_mean and self.args.gradient_accumulation_steps == 1 and self._shards > 1:
            raise InputError(
                f"only a part of the loss of {type(model).__name__} is divided by "
                f"num_items_in_batch, so a batch can't be cut into shards: use "
                f"gradient_accumulation_steps, whose micro-batches stay whole, or shards=1"
            )
        return False

    def _shards_of_step(self) -> int:
        parts, shards = self.args.gradient_accumulation_steps, self._experiment.shards
        if parts > 1 and "shards" in self._experiment.given and shards != parts:
            raise InputError(
                f"got shards={shards} and gradient_accumulation_steps={parts}, but micro-batches "
                f"are the shards of a step: leave shards out"
            )
        return parts if parts > 1 else shards

    def _refuse_settings(self) -> None:
        """Refuse training arguments that take the step out of evenstep's hands."""
        args = self.args
        optimizer = str(getattr(args.optim, "value", args.optim))
        refused = {
            "several processes": (args.world_size > 1, "start one, which uses all devices"),
            "fp16, bf16 or mixed_precision": (
                args.fp16 or args.bf16 or self.accelerator.mixed_precision != "no",
                "use EvenTrainer(experiment=Experiment(precision='bf16'))",
            ),
            "torch_compile": (args.torch_compile, "leave it out"),
            "DeepSpeed": (self.is_deepspeed_enabled, "leave it out"),
            "FSDP": (self.is_fsdp_enabled, "leave it out"),
            "a model over several devices (device_map)": (
                self.is_model_parallel,
                "load it on one device",
            ),
            "auto_find_batch_size": (
                args.auto_find_batch_size,
                "choose per_device_train_batch_size: the result must not depend on the memory",
            ),
            f"optim={optimizer}": ("lomo" in optimizer, "choose an optimizer that takes gradients"),
        }
        for what, (is_asked_for, instead) in refused.items():
            if is_asked_for:
                raise InputError(f"EvenTrainer got {what}: {instead}")

    def _refuse_other_device(self) -> None:
        first, theirs = self._devices[0].torch_device, self.args.device
        if first.type != theirs.type or (first.type != "cpu" and first.index != theirs.index):
            raise InputError(
                f"the first device of EvenTrainer is {self._devices[0]}, but that of its training "
                f"arguments is {theirs}: use TrainingArguments(use_cpu=True) for CPUs, or let "
                f"devices= begin with {theirs}"
            )


def _forked_generators(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def _saved_experiment(checkpoint: Path) -> dict[str, object]:
    """Return the choices that a checkpoint was trained with, by name; none of a plain one."""
    file = checkpoint / _EXPERIMENT
    if not file.exists():
        logger.warning(f"{checkpoint} was not saved by EvenTrainer: training resumes from it")
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{file} is damaged: remove it to resume without a check of shards and options"
        ) from error


def _tensors_of(inputs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim)


def _counted_answers(inputs: Mapping[str, Any], *, is_whole: bool) -> int | None:
    """Return how many answers count in the losses of transformers; None if there are none.

    A start or an end behind the text is ignored. The loss is the mean of two means, one over the
    starts and one over the ends, which can be added up over shards if both counts are equal.
    """
    text = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    both = [inputs.get("start_positions"), inputs.get("end_positions")]
    if text is None or not all(isinstance(one, torch.Tensor) for one in both):
        return None
    starts, ends = (int((one < text.shape[1]).sum()) for one in both)
    if starts != ends and not is_whole:
        raise InputError(
            f"{starts} start_positions lie inside the text of some examples, but {ends} "
            f"end_positions, so the mean of the two losses doesn't add up over shards: leave such "
            f"answers out, or set both positions to that of no answer; or use "
            f"EvenTrainer(shards=1), or gradient_accumulation_steps, whose micro-batches stay whole"
        )
    return max(starts, ends)


def _device_of(inputs: Mapping[str, Any]) -> torch.device:
    return next(_tensors_of(inputs)).device
