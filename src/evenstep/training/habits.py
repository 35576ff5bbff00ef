"""What users of other libraries try on a trainer, each answered with what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from evenstep.engine.handle import MissingName
from evenstep.errors import InputError, add_note
from evenstep.steps.step import NO_BACKWARD

_MADE_FROM = {"model", "optimizer", "experiment", "devices"}
_LOOP = "write the loop, `for X, y in trainer.epoch(loader): trainer.step(X, y)`"
_LOAD = "write evenstep.Trainer.load(folder, model, optimizer, loss)"


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
