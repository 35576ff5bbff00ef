"""What users of other libraries try on a trainer, each answered with what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from evenstep.engine.handle import MissingName
from evenstep.errors import InputError, add_note
from evenstep.steps.step import NO_BACKWARD

_MADE_FROM = {"model", "optimizer", "experiment", "devices"}
_LOOP = "write the loop, `for X, y in trainer.epoch(loader): trainer.step(X, y)`"
_LOAD = "write evenstep.Trainer.load(folder, model, optimizer, loss)"
_CLIP = "write experiment=evenstep.Experiment(clip_norm=...)"
_BF16 = 'write precision="bf16", which needs no scaler'
_EPOCHS = "write the loop, `for epoch in range(epochs)`"
_WHOLE = "give trainer.step the whole batch, which is computed in shards"
_LOADER = "the loader has it: write trainer.epoch(loader)"

KEYWORDS = {
    **dict.fromkeys(("lr", "learning_rate", "momentum", "weight_decay"), "the optimizer has it"),
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs", "num_train_epochs"), _EPOCHS),
    **dict.fromkeys(("batch_size", "num_workers", "shuffle", "drop_last"), _LOADER),
    **dict.fromkeys(("loader", "dataloader", "train_loader", "train_dataset"), _LOADER),
    **dict.fromkeys(("clip", "grad_clip", "max_grad_norm", "gradient_clip_val"), _CLIP),
    **dict.fromkeys(("amp", "autocast", "fp16", "bf16", "scaler", "grad_scaler"), _BF16),
    **dict.fromkeys(("accumulate", "accumulate_grad_batches"), _WHOLE),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps"), _WHOLE),
    **dict.fromkeys(
        ("deterministic", "benchmark"), "leave it out: every training is deterministic"
    ),
    "find_unused_parameters": "leave it out: those without a gradient stay as they are",
    **dict.fromkeys(("world_size", "num_processes", "local_rank", "device_ids"), "write devices="),
    **dict.fromkeys(("strategy", "backend", "parallelism"), "write layout=evenstep.Layout(...)"),
    "metrics": "write trainer.evaluate(batches, metrics)",
}
"""Arguments that trainers of other libraries take, and what to do instead."""


if TYPE_CHECKING:
    MakesATrainer = classmethod
else:

    class MakesATrainer(classmethod):
        """A class method that is refused on an instance, which it would not change."""

        def __get__(self, instance: object, owner: type | None = None) -> Any:
            """Return the method of the class."""
            if instance is not None:
                raise AttributeError(
                    "Trainer.load makes a new trainer, and leaves this one as it is: write "
                    "trainer = evenstep.Trainer.load(folder, model, optimizer, loss) instead of "
                    "Trainer(...)"
                )
            return super().__get__(instance, owner)


def explain_backward(error: BaseException) -> None:
    """Explain `(loss / 4).backward()`, whose loss is a number, in a note on its error."""
    if not isinstance(error, AttributeError) or error.name != "backward":
        return
    if isinstance(error.obj, float):
        instead = "(instead of accumulating gradients, give trainer.step the whole batch)"
        add_note(error, f"{NO_BACKWARD} {instead}")


class Habits:
    """A base class that answers names which trainers of other libraries, and modules, have."""

    if not TYPE_CHECKING:  # which reports such names by itself
        fit = MissingName(_LOOP)
        train = MissingName(f"{_LOOP}; for the model's mode, model.train()")
        eval = MissingName("trainer.evaluate and trainer.predict set the model's mode themselves")
        test = MissingName("write trainer.evaluate(batches, metrics)")
        zero_grad = MissingName("leave it out, as each trainer.step begins with new gradients")
        parameters = MissingName("use model.parameters()")
        shards = MissingName("use trainer.experiment.shards")
        prepare = MissingName("leave it out: model, optimizer and loader stay as they are")
        clip_grad_norm_ = MissingName(_CLIP)
        accumulate = MissingName(_WHOLE)
        to = MissingName("choose devices by evenstep.Trainer(..., devices=...)")
        state_dict = MissingName(
            f"write trainer.save(folder) and {_LOAD.removeprefix('write ')}; for the model alone, "
            f"model.state_dict()"
        )
        load_state_dict = MissingName(f"{_LOAD}; for the model alone, model.load_state_dict(...)")

        def __call__(self, *arguments: object, **named: object) -> NoReturn:
            """Refuse to be called as the model is."""
            raise TypeError(
                "a trainer can't be called: use trainer.predict([X]), which computes on all "
                "devices, or model(X)"
            )

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse to replace what a trainer was made from, which would have no effect."""
        if name in _MADE_FROM and name in self.__dict__:
            raise InputError(
                f"trainer.{name} can't be replaced, since the trainer would not use it: save, and "
                f"make a new trainer, evenstep.Trainer(...)"
            )
        super().__setattr__(name, value)

    def __dir__(self) -> Iterable[str]:
        kind = type(self)
        return [
            name
            for name in super().__dir__()
            if not isinstance(inspect.getattr_static(kind, name, None), MissingName)
        ]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a trainer can't be pickled or copied: write trainer.save(folder), and "
            f"{_LOAD.removeprefix('write ')} to resume; for the model alone, "
            f"torch.save(model.state_dict(), file)"
        )
