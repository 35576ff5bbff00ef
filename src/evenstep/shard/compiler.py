"""A shard's forward and backward pass as one compiled program, which all lanes share.

Dynamo traces model, objective and backward pass into one graph and guards the Python that it has
read; inductor compiles the graph. The guards are checked once a step, in the thread that begins it.
The lanes then run the program itself on their own tensors: no guards, no autograd, and nothing that
two of them could compile at once.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import optree
import torch
from torch import nn
from torch.func import functional_call

from evenstep.batch import Batch
from evenstep.batch.rng import undrawn
from evenstep.engine.task import PLAIN, in_modes
from evenstep.errors import EvenstepError, ModelError
from evenstep.experiment import autocast
from evenstep.replicas.module_sync import gradient_hooks
from evenstep.shard.loss import Number, ShardObjective

Tensors: TypeAlias = "list[torch.Tensor]"
Call: TypeAlias = "Callable[..., Sequence[Any]]"
Kind: TypeAlias = "tuple[object, ...]"
"""What compiled code takes for granted of a tensor: shape, strides, dtype, device."""

_MOST_PROGRAMS = 64
_SETTINGS = {"trace_autograd_ops": True, "recompile_limit": 2 * _MOST_PROGRAMS}


class NotCompiledError(EvenstepError):
    """A shard can't be compiled; the message is the reason."""


class Outcome(NamedTuple):
    """What a shard gives.

    Attributes:
        total: its objective.
        divisor: what that is to be divided by, float64.
        gradients: of each parameter; None where the objective doesn't depend on it.
        buffers: what each of the model's buffers is afterwards.
    """

    total: torch.Tensor
    divisor: torch.Tensor
    gradients: list[torch.Tensor | None]
    buffers: Tensors


class Program:
    """The compiled shard, bound to a step's constants; called from any thread.

    Args:
        call: what inductor has compiled.
        kinds: of its arguments.
        sources: for each argument its place among parameters, buffers and the batch's tensors; or
            itself, if it is a constant of the step (class weights, say).
        places: for each leaf of the outcome the output that it is; None where it is None.
        layouts: for some outputs the strides that they are to be copied to.
        structure: of the outcome.
    """

    def __init__(
        self,
        call: Call,
        kinds: Sequence[Kind | None],
        sources: Sequence[Any],
        places: Sequence[_Place | None],
        layouts: dict[int, tuple[int, ...]],
        structure: optree.PyTreeSpec,
    ) -> None:
        self._call = call
        self._kinds = kinds
        self._sources = sources
        self._places = places
        self._layouts = layouts
        self._structure = structure

    def run(
        self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor], batch: Batch
    ) -> Outcome:
        """Compute a shard.

        Args:
            parameters: of the replica that it is computed on.
            buffers: their opening values; they are left as they are.
            batch: of the shape that the program was made for.

        Raises:
            ModelError: a tensor is of another kind; compiled code would read past its end.
        """
        given = [*parameters, *buffers, *optree.tree_leaves(batch)]
        arguments = [
            given[source.number] if isinstance(source, _Place) else source
            for source in self._sources
        ]
        for number, known in enumerate(self._kinds):
            if known is not None and kind(arguments[number]) != known:
                arguments[number] = _as_kind(arguments[number], known)
        with torch.no_grad():
            outputs = self._call(*arguments)
        laid_out = [
            _strided(output, self._layouts[number]) if number in self._layouts else output
            for number, output in enumerate(outputs)
        ]
        leaves = [None if place is None else laid_out[place.number] for place in self._places]
        return cast("Outcome", self._structure.unflatten(leaves))


class ShardCompiler:
    """Finds the program of a shard, and compiles it if there is none yet.

    Only ever called by the thread that begins steps.

    Args:
        model: the user's module. Its layers and hooks stay what they are.
        objective: of a shard.
        threads: that a lane may use.
        precision: dtype that autocast computes in; None for the parameters' own.

    Raises:
        NotCompiledError: the model has what a compiled backward pass would leave out, or torch is
            too old.
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
        self._whole = _Whole(model, objective)
        self._names = [
            f"model.{name}"
            for named in (model.named_parameters(), model.named_buffers())
            for name, _ in named
        ]
        # Dynamo keeps what it knows by code object; what it holds of one model is not another's.
        code = types.FunctionType(_joint.__code__.replace(), _joint.__globals__)
        self._traced = torch.compile(
            code, fullgraph=True, dynamic=False, backend=self._compile_graph
        )
        self._found: tuple[_Compiled, Sequence[Any]] | None = None
        self.compiled = 0

    def program(self, batch: Batch, *, alone: bool) -> Program:
        """Return the program for shards like `batch`, of the model as it is now.

        Args:
            batch: a shard's examples, laid out as the lanes will have them.
            alone: whether it is the whole minibatch.

        Raises:
            NotCompiledError: why there is none.
            ModelError: the objective takes the model from outside, or the model is another one at
                every step.
        """
        self._found = None
        given = self._given(batch)
        with _tracing(), in_modes(PLAIN), autocast("cpu", self._precision):
            try:
                result = self._traced(self._whole, self._names, *given, alone)
            except Exception as error:
                raise NotCompiledError(_reason(error)) from error
        if self._found is None:
            raise NotCompiledError("there is nothing in it to compute")
        compiled, arguments = self._found
        if self.compiled > _MOST_PROGRAMS:
            raise ModelError(
                f"hybridize has compiled {_MOST_PROGRAMS} programs, and needs another one: shards "
                f"come in too many shapes, or forward reads Python values that change (a counter, "
                f"a rate): keep these in tensors, or leave hybridize out"
            )
        return self._bound(compiled, arguments, result, given)

    def eager(self, batch: Batch, *, alone: bool) -> Outcome:
        """Return what the shard gives without compiling."""
        with in_modes(PLAIN), autocast("cpu", self._precision):
            return _joint(self._whole, self._names, *self._given(batch), alone)

    def _given(self, batch: Batch) -> tuple[Tensors, list[bool], Tensors, Batch]:
        # Not the parameters themselves: whoever uses those takes them from outside.
        parameters = [parameter.detach() for parameter in self._model.parameters()]
        wanted = [parameter.requires_grad for parameter in self._model.parameters()]
        return parameters, wanted, list(self._model.buffers()), batch

    def _compile_graph(self, graph: Any, examples: list[torch.Tensor]) -> Callable[..., Any]:
        """Compile a graph for Dynamo (its backend), which calls the answer once guards have held.

        That only notes what was found: the outputs of the first time are given again.
        """
        from torch._inductor.compile_fx import compile_fx

        settings = {"cpp.threads": self._threads, "fallback_random": True}
        with torch._inductor.config.patch(settings):
            compiled = _Compiled(cast("Call", compile_fx(graph, examples)))
        self.compiled += 1

        def found(*arguments: Any) -> Sequence[Any]:
            if compiled.places is None:
                with undrawn():
                    compiled.outputs = list(compiled.call(*arguments))
            self._found = compiled, arguments
            return compiled.outputs

        return found

    def _bound(
        self,
        compiled: _Compiled,
        arguments: Sequence[Any],
        result: Outcome,
        given: tuple[Tensors, list[bool], Tensors, Batch],
    ) -> Program:
        """Say which argument of a program is which tensor, and which output what."""
        parameters, _, buffers, batch = given
        at = {
            id(tensor): _Place(number)
            for number, tensor in enumerate([*parameters, *buffers, *optree.tree_leaves(batch)])
        }
        sources = [at.get(id(argument), argument) for argument in arguments]
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in sources):
            raise ModelError(
                "the objective reaches parameters of a model from outside: objective(model, "
                "*batch) must call the model that it is given"
            )
        if compiled.places is None:
            compiled.learn(arguments, result, parameters)
        assert compiled.places is not None
        assert compiled.structure is not None
        return Program(
            compiled.call,
            [kind(one) if isinstance(one, torch.Tensor) else None for one in arguments],
            sources,
            compiled.places,
            compiled.layouts,
            compiled.structure,
        )


class _Place(NamedTuple):
    """The number of a tensor in a list."""

    number: int


class _Compiled:
    """A compiled graph, and what is known of its outputs."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.outputs: list[Any] = []
        self.places: list[_Place | None] | None = None
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.structure: optree.PyTreeSpec | None = None

    def learn(self, arguments: Sequence[Any], result: Outcome, parameters: Tensors) -> None:
        """Look at the outputs of the first time; then only their places are kept.

        Gradients are to lie as their parameters do, and no two outputs in one memory: they are
        added onto each other in place.
        """
        number_of = {id(output): number for number, output in enumerate(self.outputs)}
        leaves, self.structure = optree.tree_flatten(cast("Any", result), none_is_leaf=True)
        self.places = [None if leaf is None else _Place(number_of[id(leaf)]) for leaf in leaves]
        if {place.number for place in self.places if place is not None} < {*number_of.values()}:
            raise NotCompiledError("forward keeps a tensor somewhere besides returning it")
        used = {_memory(one) for one in arguments if isinstance(one, torch.Tensor)}
        wanted = {
            id(gradient): parameter.stride()
            for gradient, parameter in zip(result.gradients, parameters, strict=True)
            if gradient is not None
        }
        for leaf, place in zip(leaves, self.places, strict=True):
            if place is None:
                continue
            strides = wanted.get(id(leaf), leaf.stride())
            if _memory(leaf) in used or leaf.stride() != strides:
                self.layouts[place.number] = strides
            used.add(_memory(leaf))
        self.outputs = [torch.empty(0) for _ in self.outputs]


class _Whole(nn.Module):
    """Model and objective as one module, so that the objective is given a module."""

    def __init__(self, model: nn.Module, objective: ShardObjective) -> None:
        super().__init__()
        self.model = model
        self.__dict__["objective"] = objective  # a loss with buffers is not a part of the model

    def forward(self, batch: Batch, alone: bool) -> tuple[torch.Tensor, Number]:
        objective: ShardObjective = self.__dict__["objective"]
        return objective(self.model, batch, alone)


def _joint(
    whole: _Whole,
    names: list[str],
    parameters: Tensors,
    wanted: list[bool],
    buffers: Tensors,
    batch: Batch,
    alone: bool,
) -> Outcome:
    """Compute a shard, forward and backward; what Dynamo traces."""
    leaves = [
        parameter.detach().requires_grad_(wants)
        for parameter, wants in zip(parameters, wanted, strict=True)
    ]
    own = [buffer.clone() for buffer in buffers]
    values = dict(zip(names, [*leaves, *own], strict=True))
    total, count = functional_call(whole, values, (batch, alone))
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad(total, learning, allow_unused=True))
    gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
    # A number may be a tensor's value; only what the graph gives is right for every shard.
    divisor = (torch.ones((), dtype=torch.float64) * count).detach()
    return Outcome(total.detach(), divisor, gradients, own)


def kind(tensor: torch.Tensor) -> Kind:
    """Return what compiled code takes for granted of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@contextlib.contextmanager
def _tracing() -> Any:
    """Let Dynamo trace backward passes, and keep more than its eight programs of a function."""
    with torch._dynamo.config.patch(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about torch
        yield


def _refuse_unfit(model: nn.Module) -> None:
    """Refuse what can't be compiled here, or not rightly."""
    if not all(hasattr(torch._dynamo.config, name) for name in _SETTINGS):
        raise NotCompiledError(f"torch {torch.__version__} is too old for it")
    for name, child in model.named_modules():
        if getattr(child, "sparse", False):
            raise NotCompiledError(f"the layer {name} has sparse gradients")
        if child._backward_hooks or child._backward_pre_hooks:
            raise NotCompiledError(f"the layer {name or 'model'} has hooks on its backward pass")
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter):
            raise NotCompiledError(f"the parameter {name} has a hook on its gradient")


def _reason(error: Exception) -> str:
    """Return in a line what is wrong, and where in the user's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ")][-1:]
    return " ".join([*lines[:2], *where]) or type(error).__name__


def _as_kind(tensor: torch.Tensor, known: Kind) -> torch.Tensor:
    """Return a tensor with the strides that compiled code takes for granted.

    Raises:
        ModelError: that is not all in which it differs.
    """
    shape, strides, dtype, device = known
    if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device):
        raise ModelError(f"a shard has {kind(tensor)} where the compiled program has {known}")
    assert isinstance(strides, tuple)
    return _strided(tensor, strides)


def _strided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    copied = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
