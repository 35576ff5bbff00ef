"""Losses: an array (n,) with the loss of each example."""

from __future__ import annotations

from typing import Any

from evenstep.mxnet.core.operand import Operator
from evenstep.mxnet.gluon.block import HybridBlock
from evenstep.mxnet.ops import losses
from evenstep.mxnet.ops.names import lookup

__all__ = [
    "HuberLoss",
    "L1Loss",
    "L2Loss",
    "Loss",
    "SigmoidBCELoss",
    "SigmoidBinaryCrossEntropyLoss",
    "SoftmaxCELoss",
    "SoftmaxCrossEntropyLoss",
]

__getattr__ = lookup("gluon.loss", __all__)


class Loss(HybridBlock):
    """A loss of predictions and labels.

    Args:
        weight: a factor; None for 1.
        batch_axis: must be 0.
        options: arguments of the loss itself.
    """

    operator = Operator("loss", losses.l2)

    def __init__(self, weight: float | None = None, batch_axis: int = 0, **options: Any) -> None:
        super().__init__()
        self._weight = weight
        self._options = options

    def forward(self, pred: Any, label: Any, sample_weight: Any = None) -> Any:
        """Return the loss of each example (n,), times its weight."""
        return self.operator(pred, label, sample_weight, weight=self._weight, **self._options)


class L2Loss(Loss):
    """Half the squared difference, as a mean over each example."""

    def __init__(self, weight: float = 1.0, batch_axis: int = 0) -> None:
        super().__init__(weight, batch_axis)


class L1Loss(Loss):
    """The absolute difference, as a mean over each example."""

    operator = Operator("L1Loss", losses.l1)


class HuberLoss(Loss):
    """Squared where the difference is at most `rho`, linear beyond."""

    operator = Operator("HuberLoss", losses.huber)

    def __init__(self, rho: float = 1.0, weight: float | None = None, batch_axis: int = 0) -> None:
        super().__init__(weight, batch_axis, rho=rho)


class SoftmaxCrossEntropyLoss(Loss):
    """The cross-entropy of scores and labels.

    Args:
        axis: the axis of the classes.
        sparse_label: whether labels are numbers of classes; otherwise probabilities.
        from_logits: whether predictions are logarithms of probabilities already.
        weight: a factor; None for 1.
        batch_axis: must be 0.
    """

    operator = Operator("SoftmaxCrossEntropyLoss", losses.cross_entropy)

    def __init__(
        self,
        axis: int = -1,
        sparse_label: bool = True,
        from_logits: bool = False,
        weight: float | None = None,
        batch_axis: int = 0,
    ) -> None:
        options = {"axis": axis, "sparse_label": sparse_label, "from_logits": from_logits}
        super().__init__(weight, batch_axis, **options)


class SigmoidBinaryCrossEntropyLoss(Loss):
    """The binary cross-entropy of scores (or probabilities, `from_sigmoid`) and labels."""

    operator = Operator("SigmoidBinaryCrossEntropyLoss", losses.binary_cross_entropy)

    def __init__(
        self, from_sigmoid: bool = False, weight: float | None = None, batch_axis: int = 0
    ) -> None:
        super().__init__(weight, batch_axis, from_sigmoid=from_sigmoid)


SoftmaxCELoss = SoftmaxCrossEntropyLoss
SigmoidBCELoss = SigmoidBinaryCrossEntropyLoss
