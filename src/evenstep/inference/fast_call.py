"""`hybridize`: finds the fastest way to call a model for inference.

Small models spend much of their time between operations: in Python and in dispatching. `hybridize`
unrolls, traces and compiles the model, times each method, and uses the fastest one whose outputs
agree with the model's own. The weights are those at the time of the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import optree
import torch
from torch import nn

from evenstep.devices import accelerator
from evenstep.errors import EvenstepError, ModelError, hides_own_frames
from evenstep.inference.export import Inputs, as_inputs, recorded
from evenstep.inference.unrolled import unrolled
from evenstep.private_torch.compilers import compile_ahead, load_compiled
from evenstep.shard.evaluation import evaluation_mode

logger = logging.getLogger("evenstep")

Call: TypeAlias = Callable[..., Any]

_ROUNDS = 7
_ROUND_S = 0.02  # approximate time for each method
_BOUND = 1e-5  # the largest difference of outputs, relative to the largest output


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of calling a model.

    Attributes:
        name: "eager", "unrolled", "traced" or "compiled".
        call_us: median microseconds of a call; NaN if the method can't be used.
        max_difference: the largest difference of its outputs from the model's own.
        why_not: the reason why it can't be used; "" if it can.
    """

    name: str
    call_us: float
    max_difference: float = 0.0
    why_not: str = ""


class Hybrid:
    """A model in evaluation mode, called by the fastest method that was found.

    Compiled code is specialised for the shape, strides, dtype and device of the example. Other
    inputs, and those that require gradients, are passed to the model itself.

    Attributes:
        methods: all methods that were tried, the fastest first.
        method: the method that is used.
    """

    def __init__(
        self, net: nn.Module, inputs: Sequence[torch.Tensor], methods: Sequence[Method], call: Call
    ) -> None:
        self.methods = tuple(methods)
        self.method = methods[0]
        self._net = net
        self._call = call
        self._kinds = [_kind(tensor) for tensor in inputs]

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Return the model's outputs, without gradients."""
        if [*map(_kind, inputs)] == self._kinds:
            return self._call(*inputs)
        return eager(self._net)(*inputs)


def _kind(x: torch.Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


@hides_own_frames
def hybridize(net: nn.Module, example: Inputs) -> Hybrid:
    """Find the fastest method of calling a model repeatedly with inputs like `example`.

    Compiling takes about half a minute. The result is logged in one line.

    Args:
        net: the model; it is not changed.
        example: an input of the model, a tensor or a tuple of tensors.

    Returns:
        A callable that takes the model's inputs and returns its outputs, without gradients.

    Raises:
        ModelError: the model can't be called with the example.
        ExportError: the example is not a tensor or a tuple of tensors with a batch dimension.
    """
    with _as_it_was(net):
        return _fastest(net, as_inputs(example))


def _fastest(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Hybrid:
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
    fastest = sorted(calls, key=lambda name: times[name])
    methods = [Method(name, times[name], differences[name]) for name in fastest]
    methods += [Method(name, float("nan"), why_not=reason) for name, reason in why_not.items()]
    usable = ", ".join(f"{name} {times[name]:.1f} us" for name in fastest)
    refused = "".join(f"; {name}: {reason}" for name, reason in why_not.items())
    logger.info(f"{type(net).__name__}: {fastest[0]} calls are used ({usable}{refused})")
    return Hybrid(net, inputs, methods, calls[fastest[0]])


@contextlib.contextmanager
def _as_it_was(net: nn.Module) -> Iterator[None]:
    """Restore buffers and torch's generator at the end: the model is called many times inside."""
    buffers = [
        (module, name, one, one.clone())
        for module in net.modules()
        for name, one in module.named_buffers(recurse=False)
    ]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, name, one, value in buffers:
            setattr(module, name, one)
            if not torch.equal(one, value):
                one.detach().copy_(value)


def eager(net: nn.Module) -> Call:
    """Return a function that calls the model itself, in evaluation mode and without gradients."""

    def call(*inputs: torch.Tensor) -> Any:
        if net.training:
            with evaluation_mode(net), torch.no_grad():
                return net(*inputs)
        with torch.no_grad():
            return net(*inputs)

    return call


def _unrolled(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Call:
    """Record the operations of one call as a function of Python."""
    with evaluation_mode(net), torch.no_grad():
        return unrolled(net, inputs)


def _traced(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Call:
    """Record the operations of one call, with the weights as constants (TorchScript)."""
    recorded(net, inputs, dynamic=False)  # refuses branches on values, which a trace would miss
    with evaluation_mode(net), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Call = torch.jit.freeze(torch.jit.trace(net, inputs, check_trace=False))
        for _ in range(3):  # TorchScript optimises the module during its first calls
            module(*inputs)
    return module


def _compiled(net: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Call:
    """Compile to machine code ahead of time (AOTInductor); the loader calls it without guards."""
    program = recorded(net, inputs, dynamic=False)
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = str(Path(folder) / "hybrid.pt2")
        compile_ahead()(program, package_path=package)
        loaded: Call = load_compiled()(package, run_single_threaded=True)
        return loaded


_MAKERS: dict[str, Callable[[nn.Module, tuple[torch.Tensor, ...]], Call]] = {
    "unrolled": _unrolled,
    "traced": _traced,
    "compiled": _compiled,
}


def _made(
    make: Callable[[], Call], inputs: tuple[torch.Tensor, ...], expected: Any
) -> tuple[Call | None, float, str]:
    """Return a call and its largest difference from `expected`; or None, and the reason."""
    try:
        call = make()
        return call, _difference(call(*inputs), expected), ""
    except Exception as error:
        return None, 0.0, str(error).splitlines()[0] if str(error) else type(error).__name__


def _difference(found: Any, expected: Any) -> float:
    """Return the largest difference between outputs.

    Raises:
        _DiffersError: it is larger than rounding explains.
    """
    pairs = list(zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True))
    largest = max((e.abs().max().item() for _, e in pairs if e.numel()), default=0.0)
    difference = max(((f - e).abs().max().item() for f, e in pairs if e.numel()), default=0.0)
    if not difference <= _BOUND * max(largest, 1.0):
        raise _DiffersError(f"its outputs differ by {difference:.1e}")
    return difference


class _DiffersError(EvenstepError):
    """A method gives other outputs than the model."""


def _times(calls: dict[str, Call], inputs: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the microseconds of a call by each method: medians of interleaved rounds."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {name: max(1, int(_ROUND_S / _once(call, inputs))) for name, call in calls.items()}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            began = time.perf_counter()
            for _ in range(repeats[name]):
                call(*inputs)
            accelerator.synchronize(inputs[0].device)
            rounds[name].append((time.perf_counter() - began) / repeats[name] * 1e6)
    return {name: statistics.median(taken) for name, taken in rounds.items()}


def _once(call: Call, inputs: tuple[torch.Tensor, ...]) -> float:
    call(*inputs)
    accelerator.synchronize(inputs[0].device)
    began = time.perf_counter()
    call(*inputs)
    accelerator.synchronize(inputs[0].device)
    return time.perf_counter() - began
