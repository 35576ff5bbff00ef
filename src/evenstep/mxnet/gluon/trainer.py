"""`gluon.Trainer`: sums the gradients of all contexts in the canonical order, and updates each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenstep.collectives import tree_sum
from evenstep.errors import MXNetError, hides_own_frames
from evenstep.mxnet import optimizer as optimizers
from evenstep.mxnet.core.context import Context
from evenstep.mxnet.core.invoke import run
from evenstep.mxnet.gluon.parameter import Parameter


class Trainer:
    """Updates parameters by their gradients, on all contexts.

    Args:
        params: parameters, as `collect_params` returns them.
        optimizer: the name of an optimizer.
        optimizer_params: its arguments, with MXNet's names: learning_rate, momentum, wd, ...
        kvstore: "device", "local" or None. All sum the gradients of the contexts in the canonical
            order of evenstep, in the order of the contexts.
        compression_params: not supported; must be None.
        update_on_kvstore: not used.

    Raises:
        MXNetError: an argument is not supported.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter] | Sequence[Parameter],
        optimizer: str | optimizers.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | None = "device",
        compression_params: Any = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        if kvstore not in ("device", "local", None):
            raise MXNetError(
                f"got kvstore={kvstore!r}: use 'device' or 'local'; for several processes, train "
                f"with evenstep.Trainer under torchrun"
            )
        if compression_params is not None:
            raise MXNetError("got compression_params: gradients are always summed exactly")
        listed = params.values() if isinstance(params, Mapping) else params
        self._params = list(listed)
        self._optimizer = optimizers.create(optimizer, optimizer_params)
        self._torch: dict[Context, torch.optim.Optimizer] = {}
        self._trained: tuple[Parameter, ...] = ()

    @property
    def learning_rate(self) -> float:
        """The learning rate."""
        return self._optimizer.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        self._optimizer.learning_rate = lr

    @property
    def optimizer(self) -> optimizers.Optimizer:
        """The optimizer."""
        return self._optimizer

    @hides_own_frames
    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients of all contexts, divide them by the batch size, and update.

        Args:
            batch_size: number of examples on all contexts together.
            ignore_stale_grad: leave parameters as they are that no backward pass has reached since
                the last step.

        Raises:
            MXNetError: a parameter has no new gradient.
        """
        params = self._fresh(ignore_stale_grad)
        self._sum(params)
        self._update(params, batch_size)

    @hides_own_frames
    def allreduce_grads(self) -> None:
        """Set the gradients of all contexts to their sum."""
        self._sum(self._with_gradients())

    @hides_own_frames
    def update(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Update by the gradients as they are, after `allreduce_grads`."""
        self._update(self._fresh(ignore_stale_grad), batch_size)

    def _with_gradients(self) -> list[Parameter]:
        return [one for one in self._params if one.grad_req != "null"]

    def _fresh(self, ignore_stale_grad: bool) -> list[Parameter]:
        """Return the parameters whose gradients are new on every context."""
        found = []
        for parameter in self._with_gradients():
            nodes = [array.chunk.node for array in parameter.list_data()]
            stale = [not node.is_fresh for node in nodes]
            if any(stale) and not ignore_stale_grad:
                where = [str(c) for c, old in zip(parameter.list_ctx(), stale, strict=True) if old]
                raise MXNetError(
                    f"{parameter.name} has no new gradient on {', '.join(where)} since the last "
                    f"step: call backward on a loss of every context, or give "
                    f"ignore_stale_grad=True"
                )
            if not any(stale):
                found.append(parameter)
            for node in nodes:
                node.is_fresh = False
        return found

    def _sum(self, params: Sequence[Parameter]) -> None:
        """Queue the sums; every context adds up a share of the parameters."""
        contexts = params[0].list_ctx() if params else []
        if len(contexts) < 2:
            return
        for number, context in enumerate(contexts):
            gradients = [one.list_grad() for one in params[number :: len(contexts)]]
            if gradients:
                listed = [gradient for several in gradients for gradient in several]

                def add(gradients: Any = gradients) -> None:
                    for several in gradients:
                        _all_reduce([one.value() for one in several])

                run("allreduce", context, add, writes=listed)

    def _update(self, params: Sequence[Parameter], batch_size: int) -> None:
        if not params:
            return
        if tuple(params) != self._trained:
            if self._trained:
                raise MXNetError(
                    "other parameters have new gradients than in the first step: make a Trainer "
                    "for each set of parameters"
                )
            self._trained = tuple(params)
        rate, scale = self._optimizer.next_rate(), self._optimizer.rescale_grad / batch_size
        for context in params[0].list_ctx():
            arrays = [one.data(context) for one in params]
            gradients = [array.grad for array in arrays]

            def update(
                context: Context = context, arrays: Any = arrays, gradients: Any = gradients
            ) -> None:
                self._step(context, arrays, gradients, rate, scale)

            run("update", context, update, gradients, writes=arrays)

    def _step(
        self, context: Context, arrays: Any, gradients: Any, rate: float, scale: float
    ) -> None:
        """Update the tensors of a context, in its lane."""
        tensors = [array.value() for array in arrays]
        if context not in self._torch:
            self._torch[context] = self._optimizer.make(self._groups(tensors))
        optimizer, limit = self._torch[context], self._optimizer.clip_gradient
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_mult"]
        scaled = [one.value() * scale for one in gradients]
        for tensor, gradient in zip(tensors, scaled, strict=True):
            tensor.grad = gradient if limit is None else gradient.clamp_(-limit, limit)
        optimizer.step()
        for tensor in tensors:
            tensor.grad = None

    def _groups(self, tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        groups: dict[tuple[float, float], list[torch.Tensor]] = {}
        for parameter, tensor in zip(self._trained, tensors, strict=True):
            groups.setdefault((parameter.lr_mult, parameter.wd_mult), []).append(tensor)
        return [
            {"params": found, "lr_mult": lr_mult, "wd_mult": wd_mult}
            for (lr_mult, wd_mult), found in groups.items()
        ]


def _all_reduce(gradients: Sequence[torch.Tensor]) -> None:
    """Set tensors, which may be on several devices, to their sum in the canonical order."""
    here = gradients[0].device
    total = tree_sum([one.to(here) for one in gradients], torch.add)
    assert total is not None
    for one in gradients:
        one.copy_(total)
