"""Compiles a shard's forward and backward pass into one program, which all lanes share.

Dynamo traces model, objective and backward pass into one graph, and guards the Python values that
it has read; inductor compiles the graph. The guards are checked once a step, in the thread that
begins the step. The lanes run the program itself on their own tensors: without guards, without
autograd, and with nothing that two of them could compile at the same time.
"""

from __future__ import annotations

import contextlib
import random
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.func import functional_call

from evenstep.batch import Batch
from evenstep.batch.cut import tensors_of
from evenstep.batch.rng import ShardRandomness
from evenstep.engine.task import PLAIN, aside, in_modes
from evenstep.errors import EvenstepError, ModelError
from evenstep.options.experiment import autocast
from evenstep.private_torch.compilers import (
    dynamo_settings,
    inductor,
    inductor_settings,
    pick_vectors,
)
from evenstep.private_torch.modules import has_backward_hooks
from evenstep.shard.loss import Number, ShardObjective

Tensors: TypeAlias = "list[torch.Tensor]"
Kind: TypeAlias = "tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]"
"""What compiled code assumes about a tensor: shape, strides, dtype, device."""

_MOST_PROGRAMS = 64
_SETTINGS = {"trace_autograd_ops": True, "recompile_limit": 2 * _MOST_PROGRAMS}


class NotCompiledError(EvenstepError):
    """A shard can't be compiled; the message is the reason."""


class Outcome(NamedTuple):
    """What computing a shard returns.

    Attributes:
        total: the shard's loss, summed.
        divisor: the count by which the sum of the totals is divided, float64.
        gradients: one for each parameter; None where the loss doesn't depend on it.
        buffers: the values of the model's buffers after the forward pass.
    """

    total: torch.Tensor
    divisor: torch.Tensor
    gradients: list[torch.Tensor | None]
    buffers: Tensors


class Program:
    """A compiled shard, bound to the step's constants (class weights, say).

    Args:
        compiled: the compiled graph.
        arguments: the arguments that Dynamo called the graph with.
        given: the parameters, buffers and batch tensors that they were taken from, in the order
            in which `run` gets the shard's own.
    """

    def __init__(self, compiled: _Compiled, arguments: Sequence[Any], given: Tensors) -> None:
        number_of = {id(tensor): number for number, tensor in enumerate(given)}
        numbered = dict(enumerate(arguments))
        self._compiled = compiled
        self._bound = {n: number_of[id(one)] for n, one in numbered.items() if id(one) in number_of}
        self._constants = [None if n in self._bound else one for n, one in numbered.items()]
        self._kinds = {n: _kind(o) for n, o in numbered.items() if isinstance(o, torch.Tensor)}
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in self._constants):
            raise ModelError(
                "the objective reaches parameters of a model from outside: objective(model, "
                "*batch) must call the model that it is given"
            )

    def run(self, parameters: Tensors, buffers: Tensors, batch: Batch, divisor: int = 1) -> Outcome:
        """Compute a shard; any thread may call this.

        Args:
            parameters: the replica's parameters, detached.
            buffers: the buffers' opening values; they are not written to.
            batch: examples of the shape that the program was compiled for.
            divisor: what the backward pass divides by at its root.

        Raises:
            ModelError: a tensor has a different shape, dtype or device; compiled code would read
                past its end.
        """
        given = [*parameters, *buffers, *tensors_of(batch), _root(divisor)]
        arguments: list[Any] = list(self._constants)
        for number, place in self._bound.items():
            arguments[number] = given[place]
        for number, known in self._kinds.items():
            if _kind(arguments[number]) != known:
                arguments[number] = _as_kind(arguments[number], known)
        with torch.no_grad():
            outputs = list(self._compiled.call(*arguments))
        return self._compiled.outcome(outputs, len(parameters))


class ShardCompiler:
    """Finds the program for a shard, and compiles it the first time.

    Only the thread that begins steps may call it.

    Args:
        model: the user's module; it is not changed.
        objective: computes a shard's loss as (total, count).
        threads: the number of threads that a lane may use.
        precision: the dtype that autocast computes in; None for the parameters' own.

    Attributes:
        compiled: the number of programs compiled so far.

    Raises:
        NotCompiledError: a compiled backward pass would leave out something that the model has, or
            torch is too old.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: ShardObjective,
        threads: int,
        precision: torch.dtype | None,
    ) -> None:
        _refuse_unfit(model)
        self._model = model
        self._threads = threads
        self._precision = precision
        self._whole = whole = _Whole(model, objective)
        self._names = [name for name, _ in (*whole.named_parameters(), *whole.named_buffers())]
        # Dynamo caches by code object: each model needs one of its own.
        code = types.FunctionType(_joint.__code__.replace(), _joint.__globals__)
        self._traced = torch.compile(
            code, fullgraph=True, dynamic=False, backend=self._compile_graph
        )
        self._found: tuple[_Compiled, Sequence[Any]] | None = None
        self.compiled = 0

    def program(self, batch: Batch, *, examples: int | None) -> Program:
        """Return the program for shards like `batch`, for the model as it is now.

        Args:
            batch: a shard's examples, in the memory layout that the lanes will use.
            examples: the number of examples; None for a shard that is the whole minibatch.

        Raises:
            NotCompiledError: the shard can't be compiled.
            ModelError: the objective uses a different model than it is given, or the model needs a
                new program again and again.
        """
        self._found = None
        parameters, wanted, buffers = self._state()
        root = _root(1)
        # Dynamo is to trace backward passes, and to keep more than eight programs of a function.
        tracing = dynamo_settings().patch(_SETTINGS)
        numbers = random.getstate()
        with in_modes(PLAIN), autocast("cpu", self._precision), tracing, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about torch
            try:
                result = self._traced(
                    self._whole, self._names, parameters, wanted, buffers, batch, examples, root
                )
            except Exception as error:
                raise NotCompiledError(_reason(error)) from error
        if random.getstate() != numbers:  # Dynamo of torch 2.15 traces such a call
            raise NotCompiledError("the code calls Random.random: each shard would get one number")
        if self._found is None:
            raise NotCompiledError("there is nothing in it to compute")
        if self.compiled > _MOST_PROGRAMS:
            raise ModelError(
                f"compile=True has compiled {_MOST_PROGRAMS} programs, and needs another one: "
                f"shards come in too many shapes, or forward reads Python values that change (a "
                f"counter, a rate): keep these in tensors, or leave out compile=True"
            )
        compiled, arguments = self._found
        given = [*parameters, *buffers, *tensors_of(batch), root]
        program = Program(compiled, arguments, given)
        if not compiled.places:
            compiled.learn(arguments, result, parameters)
        return program

    def eager(self, batch: Batch, *, examples: int | None) -> Outcome:
        """Return the shard's outcome without compiling."""
        with aside(), in_modes(PLAIN), autocast("cpu", self._precision):
            return _joint(self._whole, self._names, *self._state(), batch, examples, _root(1))

    def _state(self) -> tuple[Tensors, list[bool], Tensors]:
        # Detached, to tell them from parameters that the objective takes from outside.
        parameters = [parameter.detach() for parameter in self._model.parameters()]
        wanted = [parameter.requires_grad for parameter in self._model.parameters()]
        return parameters, wanted, list(self._model.buffers())

    def _compile_graph(self, graph: Any, examples: Tensors) -> Callable[..., Any]:
        """Compile a graph; Dynamo's backend. Dynamo calls the result when the guards have held.

        That call only records which graph was found, and returns the outputs of the first time.
        """
        settings = {"cpp.threads": self._threads, "fallback_random": True}
        with inductor_settings().patch(settings), _cached_by_instruction_set():
            compiled = _Compiled(cast("Callable[..., Sequence[Any]]", inductor()(graph, examples)))
        self.compiled += 1

        def found(*arguments: Any) -> Sequence[Any]:
            if not compiled.places:
                with ShardRandomness(lambda: 0):
                    compiled.outputs = list(compiled.call(*arguments))
            self._found = compiled, arguments
            return compiled.outputs

        return found


def _cached_by_instruction_set() -> contextlib.AbstractContextManager[None]:
    """Return a context in which inductor's files on disk are for this processor's vectors only.

    Inductor writes the width of vectors into its code, but not into the code's key. A program made
    with AVX-512 that a different processor finds (of a cluster, or after a move of the machine)
    reads and writes past the end of tensors.
    """
    config: Any = torch.compiler.config
    tag = f"{config.cache_key_tag} {pick_vectors()()}".strip()
    return cast("contextlib.AbstractContextManager[None]", config.patch(cache_key_tag=tag))


class _Compiled:
    """A compiled graph, and how its outputs make an `Outcome`.

    Attributes:
        call: the compiled graph.
        outputs: its outputs of the first time.
        places: for each tensor of an `Outcome`, the number of the output that it is, or None;
            empty before `learn`.
        layouts: the strides to which some outputs are copied.
    """

    def __init__(self, call: Callable[..., Sequence[Any]]) -> None:
        self.call = call
        self.outputs: list[Any] = []
        self.places: list[int | None] = []
        self.layouts: dict[int, tuple[int, ...]] = {}

    def learn(self, arguments: Sequence[Any], result: Outcome, parameters: Tensors) -> None:
        """Find the outputs of the first time in `result`; then free them.

        Each gradient gets the strides of its parameter, and each output memory of its own:
        gradients are added onto each other in place.
        """
        number_of = {id(output): number for number, output in enumerate(self.outputs)}
        leaves = [result.total, result.divisor, *result.gradients, *result.buffers]
        places = [None if leaf is None else number_of[id(leaf)] for leaf in leaves]
        if not {*number_of.values()} <= {*places}:
            raise NotCompiledError("forward keeps a tensor somewhere besides returning it")
        used = {_memory(one) for one in arguments if isinstance(one, torch.Tensor)}
        pairs = zip(result.gradients, parameters, strict=True)
        wanted = {id(gradient): parameter.stride() for gradient, parameter in pairs}
        for leaf, place in zip(leaves, places, strict=True):
            if leaf is None or place is None:
                continue
            strides = wanted.get(id(leaf), leaf.stride())
            if _memory(leaf) in used or leaf.stride() != strides:
                self.layouts[place] = strides
            used.add(_memory(leaf))
        self.places = places
        self.outputs = [torch.empty(0) for _ in self.outputs]

    def outcome(self, outputs: list[Any], parameters: int) -> Outcome:
        """Return the outcome that `outputs` make, for a model with so many `parameters`."""
        for number, strides in self.layouts.items():
            outputs[number] = _strided(outputs[number], strides)
        leaves: list[Any] = [None if place is None else outputs[place] for place in self.places]
        return Outcome(leaves[0], leaves[1], leaves[2 : 2 + parameters], leaves[2 + parameters :])


class _Whole(nn.Module):
    """Model and objective as one module, as `functional_call` needs it."""

    def __init__(self, model: nn.Module, objective: ShardObjective) -> None:
        super().__init__()
        self.model = model
        self.__dict__["objective"] = objective  # a loss with buffers is not a part of the model

    def forward(self, batch: Batch, examples: int | None) -> tuple[torch.Tensor, Number]:
        objective: ShardObjective = self.__dict__["objective"]
        total, count, *outputs = objective(self.model, batch, examples)
        if outputs:
            raise NotCompiledError("the objective returns outputs besides (total, count)")
        return total, count


def _joint(
    whole: _Whole,
    names: list[str],
    parameters: Tensors,
    wanted: list[bool],
    buffers: Tensors,
    batch: Batch,
    examples: int | None,
    root: torch.Tensor,
) -> Outcome:
    """Compute a shard, forward and backward from the gradient `root`; Dynamo traces this."""
    leaves = [
        parameter.detach().requires_grad_(wants)
        for parameter, wants in zip(parameters, wanted, strict=True)
    ]
    own = [buffer.clone() for buffer in buffers]
    values = dict(zip(names, [*leaves, *own], strict=True))
    total, count = functional_call(whole, values, (batch, examples))
    closing = [
        now if now is before else now.detach().clone()  # forward has assigned a different tensor
        for now, before in zip([values[name] for name in names[len(leaves) :]], own, strict=True)
    ]
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    begin = root.to(total.dtype).expand_as(total)
    found = iter(torch.autograd.grad(total, learning, begin, allow_unused=True))
    gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
    # A Python number may come from a tensor's value: only an output of the graph is each shard's.
    divisor = (torch.ones((), dtype=torch.float64) * count).detach()
    return Outcome(total.detach(), divisor, gradients, closing)


def _root(divisor: int) -> torch.Tensor:
    """Return the gradient that a backward pass begins with, as an argument of a program."""
    return torch.tensor(1 / divisor, dtype=torch.float64)


def _refuse_unfit(model: nn.Module) -> None:
    """Refuse models that can't be compiled, or whose gradients would be wrong."""
    if not all(hasattr(dynamo_settings(), name) for name in _SETTINGS):
        raise NotCompiledError(f"torch {torch.__version__} is too old for it")
    for name, child in model.named_modules():
        if getattr(child, "sparse", False):
            raise NotCompiledError(f"the layer {name} has sparse gradients")
        if has_backward_hooks(child):
            raise NotCompiledError(f"the layer {name or 'model'} has hooks on its backward pass")


def _reason(error: Exception) -> str:
    """Return in one line what is wrong, and where in the user's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ")][-1:]
    return " ".join([*lines[:2], *where]) or type(error).__name__


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _as_kind(tensor: torch.Tensor, known: Kind) -> torch.Tensor:
    """Copy a tensor to the strides that compiled code assumes; refuse any other difference."""
    shape, strides, dtype, device = known
    if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
        raise ModelError(f"a shard has {_kind(tensor)} where the compiled program has {known}")
    return _strided(tensor, strides)


def _strided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    copied = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
