"""`hybridize`: a model for inference, called without the interpreter in between where that pays.

Small models spend their time between the operations: in Python, and in the dispatch of each. Ways
to leave that out are tried and timed, and the fastest whose outputs agree is taken; where none is
faster than the model itself, the model itself. The weights are those of the moment.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import optree
import torch
from torch import nn

from evenstep.errors import EvenstepError, ModelError
from evenstep.inference.export import Inputs, as_inputs, recorded
from evenstep.shard.evaluation import evaluation_mode

logger = logging.getLogger("evenstep")

Call: TypeAlias = Callable[..., Any]

_ROUNDS = 7
_ROUND_S = 0.02  # for each way, about
_BOUND = 1e-5  # of the outputs' largest value, by how much an output may differ


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to call a model.

    Attributes:
        name: "eager", "traced" or "compiled".
        call_us: microseconds a call, the median; NaN where it can't be used.
        max_difference: of its outputs from the model's own.
        why_not: why it can't be used; "" where it can.
    """

    name: str
    call_us: float
    max_difference: float = 0.0
    why_not: str = ""


class Hybrid:
    """A model in evaluation mode, called in the fastest way that was found.

    With inputs of another kind than the example's (shape, strides, dtype, device), which compiled
    code takes for granted, it calls the model itself.

    Attributes:
        ways: all that were tried, the fastest first.
        way: the one that is taken.
    """

    def __init__(
        self, net: nn.Module, inputs: Sequence[torch.Tensor], ways: Sequence[Way], call: Call
    ) -> None:
        self.ways = tuple(ways)
        self.way = ways[0]
        self._net = net
        self._call = call
        self._kinds = [_kind(tensor) for tensor in inputs]

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Return the model's outputs, without gradients."""
        if [*map(_kind, inputs)] == self._kinds:
            return self._call(*inputs)
        return eager(self._net)(*inputs)


def _kind(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def hybridize(net: nn.Module, example: Inputs) -> Hybrid:
    """Find the fastest way to call a model again and again on inputs like `example`.

    Compiling takes half a minute or so; the line that is logged says what came of it.

    Args:
        net: the model; it is left as it was.
        example: what it is called with: a tensor, or a tuple of tensors.

    Raises:
        ModelError: the model can't be called with the example.
    """
    inputs = as_inputs(example)
    plain = eager(net)
    try:
        expected = plain(*inputs)
    except Exception as error:
        name = type(net).__name__
        raise ModelError(f"{name} can't be called with the example: {error}") from error
    calls: dict[str, Call] = {"eager": plain}
    differences = {"eager": 0.0}
    why_not: dict[str, str] = {}
    for name, make in _MAKERS.items():
        call, difference, reason = _made(functools.partial(make, net, inputs), inputs, expected)
        if call is None:
            why_not[name] = reason
        else:
            calls[name], differences[name] = call, difference
    times = _times(calls, inputs)
    ways = sorted(
        (Way(name, times[name], differences[name]) for name in calls), key=lambda way: way.call_us
    )
    ways += [Way(name, float("nan"), why_not=reason) for name, reason in why_not.items()]
    told = ", ".join(f"{way.name} {way.call_us:.1f} us" for way in ways if not way.why_not)
    refused = "".join(f"; {way.name}: {way.why_not}" for way in ways if way.why_not)
    logger.info(f"{type(net).__name__} is called {ways[0].name} ({told}{refused})")
    return Hybrid(net, inputs, ways, calls[ways[0].name])


def eager(net: nn.Module) -> Call:
    """Return what calls the model itself, in evaluation mode and without gradients."""

    def call(*inputs: torch.Tensor) -> Any:
        if net.training:
            with evaluation_mode(net), torch.no_grad():
                return net(*inputs)
        with torch.no_grad():
            return net(*inputs)

    return call


def _traced(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Call:
    """Record the operations of one call, with the weights as constants (TorchScript)."""
    recorded(net, inputs, dynamic=False)  # refuses what depends on values: a trace would not notice
    with evaluation_mode(net), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Call = torch.jit.freeze(torch.jit.trace(net, inputs, check_trace=False))
        for _ in range(3):  # it optimises itself in its first calls
            module(*inputs)
    return module


def _compiled(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Call:
    """Compile to machine code ahead of time (AOTInductor); the loader calls it without guards."""
    program = recorded(net, inputs, dynamic=False)
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = str(Path(folder) / "hybrid.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        loaded: Call = torch._inductor.aoti_load_package(package, run_single_threaded=True)
        return loaded


_MAKERS: dict[str, Callable[[nn.Module, tuple[torch.Tensor, ...]], Call]] = {
    "traced": _traced,
    "compiled": _compiled,
}


def _made(
    make: Callable[[], Call], inputs: tuple[torch.Tensor, ...], expected: Any
) -> tuple[Call | None, float, str]:
    """Return a way to call the model and how far it is off; or None, and why not."""
    try:
        call = make()
        return call, _difference(call(*inputs), expected), ""
    except Exception as error:
        return None, 0.0, str(error).splitlines()[0] if str(error) else type(error).__name__


def _difference(found: Any, expected: Any) -> float:
    """Return by how much outputs differ at most.

    Raises:
        _DiffersError: by more than rounding explains.
    """
    pairs = list(zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True))
    largest = max((e.abs().max().item() for _, e in pairs if e.numel()), default=0.0)
    difference = max(((f - e).abs().max().item() for f, e in pairs if e.numel()), default=0.0)
    if not difference <= _BOUND * max(largest, 1.0):
        raise _DiffersError(f"its outputs differ by {difference:.1e}")
    return difference


class _DiffersError(EvenstepError):
    """A way to call a model gives other outputs."""


def _times(calls: dict[str, Call], inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the microseconds of a call for each way: medians of interleaved rounds."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {name: max(1, int(_ROUND_S / _once(call, inputs))) for name, call in calls.items()}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(repeats[name]):
                call(*inputs)
            rounds[name].append((time.perf_counter() - began) / repeats[name] * 1e6)
    return {name: statistics.median(taken) for name, taken in rounds.items()}


def _once(call: Call, inputs: tuple[torch.Tensor, ...]) -> float:
    call(*inputs)
    began = time.perf_counter()
    call(*inputs)
    return time.perf_counter() - began
