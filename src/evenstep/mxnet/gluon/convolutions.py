"""Layers of images: convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenstep.errors import MXNetError
from evenstep.mxnet.gluon.block import HybridBlock
from evenstep.mxnet.gluon.layers import Activation
from evenstep.mxnet.gluon.parameter import Init

Size = int | Sequence[int]


def _tuple(size: Size, axes: int) -> tuple[int, ...]:
    return (size,) * axes if isinstance(size, int) else tuple(size)


class _Convolution(HybridBlock):
    """A convolution over some axes.

    Args:
        channels: number of output channels.
        kernel_size: size of the window.
        strides: steps of the window.
        padding: zeros on each side.
        dilation: distance of the window's elements.
        groups: number of groups of channels.
        layout: must be the default, channels after the batch.
        in_channels: number of input channels; 0 to find it in the first call.
        activation: name of an activation, or None.
        use_bias: whether there is a bias.
        weight_initializer: initializer of the weight, or None.
        bias_initializer: initializer of the bias.
        options: prefix and params, as for `Block`.
    """

    axes = 2
    operation = "Convolution"

    def __init__(
        self,
        channels: int,
        kernel_size: Size,
        strides: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        layout: str | None = None,
        in_channels: int = 0,
        activation: str | None = None,
        use_bias: bool = True,
        weight_initializer: Init = None,
        bias_initializer: Init = "zeros",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        _check_layout(layout, self.axes)
        self._channels = channels
        self._kernel = _tuple(kernel_size, self.axes)
        self._settings = {
            "stride": _tuple(strides, self.axes),
            "pad": _tuple(padding, self.axes),
            "dilate": _tuple(dilation, self.axes),
            "num_group": groups,
        }
        shape = self._weight_shape(in_channels)
        self.weight = self.params.get("weight", shape=shape, init=weight_initializer)
        if use_bias:
            self.bias = self.params.get("bias", shape=(channels,), init=bias_initializer)
        with self.name_scope():
            self.act = (
                None if activation is None else Activation(activation, prefix=f"{activation}_")
            )

    def _weight_shape(self, in_channels: int) -> tuple[int, ...]:
        return (self._channels, in_channels // self._settings["num_group"], *self._kernel)  # type: ignore[operator]

    def infer_shape(self, x: Any, *others: Any) -> None:
        """Find the number of input channels."""
        self.weight.shape = self._weight_shape(x.shape[1])

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        """Return the images after the convolution."""
        named = {} if hasattr(x, "chunk") else {"name": "fwd"}
        found = getattr(F, self.operation)(
            x, weight, bias, kernel=self._kernel, no_bias=bias is None, **self._settings, **named
        )
        return found if self.act is None else self.act(found)

    def __repr__(self) -> str:
        inputs = (self.weight.shape or (0, 0))[1] or None
        return (
            f"{type(self).__name__}({inputs} -> {self._channels}, kernel_size={self._kernel}, "
            f"stride={self._settings['stride']}, padding={self._settings['pad']})"
        )


class Conv1D(_Convolution):
    """A convolution over one axis."""

    axes = 1


class Conv2D(_Convolution):
    """A convolution over images."""


class Conv3D(_Convolution):
    """A convolution over three axes."""

    axes = 3


class Conv2DTranspose(_Convolution):
    """A transposed convolution over images."""

    operation = "Deconvolution"

    def __init__(
        self, channels: int, kernel_size: Size, output_padding: Size = 0, **options: Any
    ) -> None:
        super().__init__(channels, kernel_size, **options)
        self._settings["adj"] = _tuple(output_padding, self.axes)

    def _weight_shape(self, in_channels: int) -> tuple[int, ...]:
        return (in_channels, self._channels // self._settings["num_group"], *self._kernel)  # type: ignore[operator]


class _Pooling(HybridBlock):
    """Maxima or means over windows.

    Args:
        pool_size: size of the window.
        strides: steps of the window; None for its size.
        padding: on each side.
        ceil_mode: whether a window may end outside.
        layout: must be the default, channels after the batch.
        count_include_pad: whether means count the padding.
        options: prefix and params, as for `Block`.
    """

    axes = 2
    kind = "max"
    is_global = False

    def __init__(
        self,
        pool_size: Size = 2,
        strides: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        layout: str | None = None,
        count_include_pad: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        _check_layout(layout, self.axes)
        kernel = _tuple(pool_size, self.axes)
        self._settings = {
            "kernel": kernel,
            "stride": kernel if strides is None else _tuple(strides, self.axes),
            "pad": _tuple(padding, self.axes),
            "pool_type": self.kind,
            "global_pool": self.is_global,
            "pooling_convention": "full" if ceil_mode else "valid",
            "count_include_pad": count_include_pad,
        }

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        """Return the pooled images."""
        named = {} if hasattr(x, "chunk") else {"name": "fwd"}
        return F.Pooling(x, **self._settings, **named)

    def __repr__(self) -> str:
        size = self._settings
        return f"{type(self).__name__}(size={size['kernel']}, stride={size['stride']})"


class MaxPool1D(_Pooling):
    """Maxima over windows of one axis."""

    axes = 1


class MaxPool2D(_Pooling):
    """Maxima over windows of images."""


class AvgPool1D(_Pooling):
    """Means over windows of one axis."""

    axes, kind = 1, "avg"


class AvgPool2D(_Pooling):
    """Means over windows of images."""

    kind = "avg"


class GlobalMaxPool2D(_Pooling):
    """Maxima over whole images."""

    is_global = True


class GlobalAvgPool1D(_Pooling):
    """Means over the whole last axis."""

    axes, kind, is_global = 1, "avg", True


class GlobalAvgPool2D(_Pooling):
    """Means over whole images."""

    kind, is_global = "avg", True


def _check_layout(layout: str | None, axes: int) -> None:
    wanted = {1: "NCW", 2: "NCHW", 3: "NCDHW"}[axes]
    if layout not in (None, wanted):
        raise MXNetError(f"got layout={layout!r}: images have the layout {wanted} here")
