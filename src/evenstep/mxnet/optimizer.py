"""The optimizers that `gluon.Trainer` knows by name, over torch.optim."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from evenstep.errors import MXNetError
from evenstep.mxnet.ops.names import lookup

__all__ = ["Optimizer", "create"]

_BETAS = {"beta1": (0, 0.9), "beta2": (1, 0.999)}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """An optimizer of torch, and MXNet's names of its arguments.

    Attributes:
        make: torch's class.
        lr: the learning rate without `learning_rate`.
        names: from MXNet's names to torch's.
        fixed: arguments that make torch compute what MXNet does.
    """

    make: Callable[..., torch.optim.Optimizer]
    lr: float
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_KINDS = {
    "sgd": _Kind(torch.optim.SGD, 0.01, {"momentum": "momentum"}),
    "nag": _Kind(torch.optim.SGD, 0.1, {"momentum": "momentum"}, {"nesterov": True}),
    "adam": _Kind(torch.optim.Adam, 0.001, {"epsilon": "eps"}),
    "adamw": _Kind(torch.optim.AdamW, 0.001, {"epsilon": "eps"}, {"weight_decay": 0.0}),
    "adagrad": _Kind(torch.optim.Adagrad, 0.01, {"eps": "eps", "epsilon": "eps"}),
    "adadelta": _Kind(torch.optim.Adadelta, 1.0, {"rho": "rho", "epsilon": "eps"}),
    "rmsprop": _Kind(
        torch.optim.RMSprop, 0.001, {"gamma1": "alpha", "rho": "alpha", "epsilon": "eps"}
    ),
    "adamax": _Kind(torch.optim.Adamax, 0.002),
}


class Optimizer:
    """An optimizer by its name, with MXNet's names of its arguments.

    Args:
        name: "sgd", "nag", "adam", "adamw", "adagrad", "adadelta", "rmsprop" or "adamax".
        learning_rate: the learning rate; None for the optimizer's own.
        wd: weight decay.
        clip_gradient: the largest absolute value of an element of a gradient; None for no limit.
        lr_scheduler: called with the number of the update, from 1; returns the learning rate.
        rescale_grad: a factor of the gradients, besides 1 over the batch size.
        options: further arguments of the optimizer.

    Attributes:
        learning_rate: the learning rate of the next update.
        updates: the number of updates so far.

    Raises:
        MXNetError: the optimizer or an argument is not known.
    """

    def __init__(
        self,
        name: str,
        learning_rate: float | None = None,
        wd: float = 0.0,
        clip_gradient: float | None = None,
        lr_scheduler: Callable[[int], float] | None = None,
        rescale_grad: float = 1.0,
        **options: Any,
    ) -> None:
        kind = _KINDS.get(name.lower())
        if kind is None:
            raise MXNetError(f"got optimizer {name!r}: use one of {', '.join(_KINDS)}")
        self.name = name.lower()
        self._kind = kind
        self.learning_rate = kind.lr if learning_rate is None else learning_rate
        self.wd = wd
        self.clip_gradient = clip_gradient
        self.lr_scheduler = lr_scheduler
        self.rescale_grad = rescale_grad
        self.updates = 0
        self._options = self._translated(options)

    def _translated(self, options: dict[str, Any]) -> dict[str, Any]:
        has_betas = self.name in ("adam", "adamw", "adamax")
        known = [*self._kind.names, *(_BETAS if has_betas else ())]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise MXNetError(
                f"got {', '.join(unknown)} for {self.name}: it has learning_rate, wd, "
                f"clip_gradient, lr_scheduler{''.join(', ' + name for name in known)}"
            )
        found = {self._kind.names[k]: v for k, v in options.items() if k in self._kind.names}
        if has_betas:
            found["betas"] = tuple(options.get(k, default) for k, (_, default) in _BETAS.items())
        return found | dict(self._kind.fixed)

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return torch's optimizer for groups of tensors with `lr_mult` and `wd_mult`."""
        found = [
            {
                "params": group["params"],
                "lr": self.learning_rate * group["lr_mult"],
                "weight_decay": self.wd * group["wd_mult"],
                "lr_mult": group["lr_mult"],
            }
            for group in groups
        ]
        return self._kind.make(found, lr=self.learning_rate, **self._options)

    def next_rate(self) -> float:
        """Count an update, and return its learning rate."""
        self.updates += 1
        if self.lr_scheduler is not None:
            self.learning_rate = float(self.lr_scheduler(self.updates))
        return self.learning_rate


def create(name: str | Optimizer, options: Mapping[str, Any] | None = None) -> Optimizer:
    """Return an optimizer for its name and its arguments."""
    return name if isinstance(name, Optimizer) else Optimizer(name, **(options or {}))


def __getattr__(name: str) -> Any:
    """Return what makes an optimizer that MXNet has as a class, such as `Adam`."""
    if name.lower() in _KINDS and name[:1].isupper():
        return functools.partial(Optimizer, name.lower())
    return _lookup(name)


_CLASSES = ("SGD", "NAG", "Adam", "AdamW", "AdaGrad", "AdaDelta", "RMSProp", "Adamax")
_lookup = lookup("optimizer", [*__all__, *_CLASSES])
