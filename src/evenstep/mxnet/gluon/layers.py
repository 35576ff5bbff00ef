"""Layers: Dense, Dropout, BatchNorm, Embedding, activations, and sequences of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from evenstep.errors import MXNetError
from evenstep.mxnet import nd
from evenstep.mxnet.gluon.block import Block, HybridBlock
from evenstep.mxnet.gluon.parameter import Init


class _Sequence(Block):
    """Blocks that are called one after another."""

    def add(self, *blocks: Block) -> None:
        """Add blocks at the end."""
        for block in blocks:
            self.register_child(block)

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._children.values())

    def __getitem__(self, key: int | slice) -> Any:
        """Return a block, or a sequence of some of them."""
        blocks = list(self._children.values())
        if isinstance(key, int):
            return blocks[key]
        part = type(self)(prefix=self.prefix)
        part.add(*blocks[key])
        return part


class Sequential(_Sequence):
    """Blocks that are called one after another."""

    def forward(self, x: Any, *others: Any) -> Any:
        """Return the output of the last block."""
        for block in self._children.values():
            x = block(x, *others)
            others = ()
        return x


class HybridSequential(_Sequence, HybridBlock):
    """Hybrid blocks that are called one after another."""

    def forward(self, x: Any, *others: Any) -> Any:
        """Return the output of the last block."""
        for block in self._children.values():
            x = block(x, *others)
            others = ()
        return x


class Activation(HybridBlock):
    """An activation by its name: relu, sigmoid, tanh, softrelu or softsign."""

    def __init__(self, activation: str, **options: Any) -> None:
        super().__init__(**options)
        self._activation = activation

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Apply it to each element."""
        return F.Activation(x, act_type=self._activation, **_named(x, "fwd"))

    def __repr__(self) -> str:
        return f"Activation({self._activation})"


class Dense(HybridBlock):
    """A fully connected layer: `activation(x @ weight.T + bias)`.

    Args:
        units: number of outputs.
        activation: name of an activation, or None.
        use_bias: whether there is a bias.
        flatten: whether examples are flattened to vectors; False applies it to the last axis.
        dtype: dtype of the parameters.
        weight_initializer: initializer of the weight, or None.
        bias_initializer: initializer of the bias.
        in_units: number of inputs; 0 to find it in the first call.
        options: prefix and params, as for `Block`.
    """

    def __init__(
        self,
        units: int,
        activation: str | None = None,
        use_bias: bool = True,
        flatten: bool = True,
        dtype: Any = "float32",
        weight_initializer: Init = None,
        bias_initializer: Init = "zeros",
        in_units: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._units = units
        self._flatten = flatten
        get = self.params.get
        self.weight = get("weight", shape=(units, in_units), dtype=dtype, init=weight_initializer)
        if use_bias:
            self.bias = get("bias", shape=(units,), dtype=dtype, init=bias_initializer)
        with self.name_scope():
            self.act = (
                None if activation is None else Activation(activation, prefix=f"{activation}_")
            )

    def infer_shape(self, x: Any, *others: Any) -> None:
        """Find the number of inputs."""
        inputs = math.prod(x.shape[1:]) if self._flatten else x.shape[-1]
        self.weight.shape = (self._units, inputs)

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        """Return the outputs (n, units)."""
        named = _named(x, "fwd")
        found = F.FullyConnected(
            x,
            weight,
            bias,
            no_bias=bias is None,
            num_hidden=self._units,
            flatten=self._flatten,
            **named,
        )
        return found if self.act is None else self.act(found)

    def __repr__(self) -> str:
        inputs = (self.weight.shape or (0, 0))[1] or None
        act = "linear" if self.act is None else self.act
        return f"Dense({inputs} -> {self._units}, {act})"


class Dropout(HybridBlock):
    """Sets elements to 0 with probability `rate` during training.

    Args:
        rate: the probability.
        axes: not supported; must be empty.
        options: prefix and params, as for `Block`.
    """

    def __init__(self, rate: float, axes: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(**options)
        if axes:
            raise MXNetError(f"got axes={axes}: Dropout draws for each element here; leave it out")
        self._rate = rate

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Return the elements that are kept, scaled."""
        return F.Dropout(x, p=self._rate, **_named(x, "fwd"))

    def __repr__(self) -> str:
        return f"Dropout(p = {self._rate})"


class BatchNorm(HybridBlock):
    """Normalises channels (axis 1) with the statistics of the batch on its context.

    Args:
        axis: must be 1.
        momentum: weight of the old running statistics.
        epsilon: added to the variance.
        center: whether an offset is learned.
        scale: whether a scale is learned.
        use_global_stats: normalise with the running statistics during training, too.
        in_channels: number of channels; 0 to find it in the first call.
        options: prefix and params, as for `Block`.
    """

    def __init__(
        self,
        axis: int = 1,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        in_channels: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if axis != 1:
            raise MXNetError(f"got axis={axis}: BatchNorm normalises axis 1 here")
        self._momentum = momentum
        self._epsilon = epsilon
        self._global = use_global_stats
        self._scale = scale
        shape, get = (in_channels,), self.params.get
        self.gamma = get("gamma", grad_req="write" if scale else "null", shape=shape)
        self.beta = get("beta", grad_req="write" if center else "null", shape=shape)
        self.running_mean = get("running_mean", grad_req="null", shape=shape)
        self.running_var = get("running_var", grad_req="null", shape=shape)

    def infer_shape(self, x: Any, *others: Any) -> None:
        """Find the number of channels."""
        for parameter in (self.gamma, self.beta, self.running_mean, self.running_var):
            parameter.shape = (x.shape[1],)

    def hybrid_forward(
        self,
        F: Any,
        x: Any,
        gamma: Any,
        beta: Any,
        running_mean: Any,
        running_var: Any,
    ) -> Any:
        """Return the normalised channels."""
        return F.BatchNorm(
            x,
            gamma,
            beta,
            running_mean,
            running_var,
            eps=self._epsilon,
            momentum=self._momentum,
            fix_gamma=not self._scale,
            use_global_stats=self._global,
            **_named(x, "fwd"),
        )

    def __repr__(self) -> str:
        return f"BatchNorm(eps={self._epsilon}, momentum={self._momentum})"


class LayerNorm(HybridBlock):
    """Normalises along the last axis.

    Args:
        axis: must be -1.
        epsilon: added to the variance.
        in_channels: size of the last axis; 0 to find it in the first call.
        options: prefix and params, as for `Block`.
    """

    def __init__(
        self, axis: int = -1, epsilon: float = 1e-5, in_channels: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        if axis != -1:
            raise MXNetError(f"got axis={axis}: LayerNorm normalises the last axis here")
        self._epsilon = epsilon
        self.gamma = self.params.get("gamma", shape=(in_channels,))
        self.beta = self.params.get("beta", shape=(in_channels,))

    def infer_shape(self, x: Any, *others: Any) -> None:
        """Find the size of the last axis."""
        self.gamma.shape = self.beta.shape = (x.shape[-1],)

    def hybrid_forward(self, F: Any, x: Any, gamma: Any, beta: Any) -> Any:
        """Return the normalised values."""
        return F.LayerNorm(x, gamma, beta, eps=self._epsilon, **_named(x, "fwd"))


class Embedding(HybridBlock):
    """A vector for each of `input_dim` numbers.

    Args:
        input_dim: how many numbers there are.
        output_dim: length of a vector.
        dtype: dtype of the vectors.
        weight_initializer: initializer, or None.
        options: prefix and params, as for `Block`.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        dtype: Any = "float32",
        weight_initializer: Init = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        shape = (input_dim, output_dim)
        self.weight = self.params.get("weight", shape=shape, dtype=dtype, init=weight_initializer)

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:
        """Return the vectors of the numbers in `x`."""
        return F.Embedding(x, weight, **_named(x, "fwd"))


class Flatten(HybridBlock):
    """Flattens examples to vectors."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Return an array (n, everything else)."""
        return F.Flatten(x, **_named(x, "fwd"))

    def __repr__(self) -> str:
        return "Flatten"


class LeakyReLU(HybridBlock):
    """The leaky ReLU with a fixed slope."""

    def __init__(self, alpha: float, **options: Any) -> None:
        super().__init__(**options)
        self._alpha = alpha

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Apply it to each element."""
        return F.LeakyReLU(x, act_type="leaky", slope=self._alpha, **_named(x, "fwd"))


class ELU(LeakyReLU):
    """The exponential linear unit."""

    def __init__(self, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(alpha, **options)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Apply it to each element."""
        return F.LeakyReLU(x, act_type="elu", slope=self._alpha, **_named(x, "fwd"))


class GELU(HybridBlock):
    """The Gaussian error linear unit."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Apply it to each element."""
        return F.LeakyReLU(x, act_type="gelu", **_named(x, "fwd"))


class SELU(HybridBlock):
    """The scaled exponential linear unit."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Apply it to each element."""
        return F.LeakyReLU(x, act_type="selu", **_named(x, "fwd"))


class Swish(HybridBlock):
    """x · sigmoid(beta · x)."""

    def __init__(self, beta: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self._beta = beta

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Apply it to each element."""
        return x * F.sigmoid(x * self._beta)


class PReLU(HybridBlock):
    """The leaky ReLU with a learned slope."""

    def __init__(
        self, alpha_initializer: Init = None, in_channels: int = 1, **options: Any
    ) -> None:
        super().__init__(**options)
        self.alpha = self.params.get("alpha", shape=(in_channels,), init=alpha_initializer)

    def hybrid_forward(self, F: Any, x: Any, alpha: Any) -> Any:
        """Apply it to each element."""
        return F.LeakyReLU(x, gamma=alpha, act_type="prelu", **_named(x, "fwd"))


class Lambda(Block):
    """A function of arrays, or the name of one of `nd`, as a block."""

    def __init__(self, function: Callable[..., Any] | str, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self._function = getattr(nd, function) if isinstance(function, str) else function

    def forward(self, *inputs: Any) -> Any:
        """Call the function."""
        return self._function(*inputs)


class HybridLambda(HybridBlock):
    """A function `(F, x)`, or the name of one of `nd`, as a hybrid block."""

    def __init__(self, function: Callable[..., Any] | str, prefix: str | None = None) -> None:
        super().__init__(prefix)
        self._function = function

    def hybrid_forward(self, F: Any, x: Any, *others: Any) -> Any:
        """Call the function."""
        if isinstance(self._function, str):
            return getattr(F, self._function)(x, *others)
        return self._function(F, x, *others)


def _named(x: Any, name: str) -> dict[str, str]:
    """Return `name=` for operations on symbols."""
    return {} if hasattr(x, "chunk") else {"name": name}
