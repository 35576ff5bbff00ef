"""The arithmetic of a slice: its result, and its gradients, by torch's own kernels.

Every product says how the layer is cut. Along its outputs, each slice gives some of the output
features (or channels) and reads the whole input: no sum is cut. Along its inputs, each slice reads
some of the input features, and gives a partial result for all outputs. (Krizhevsky, "One weird
trick for parallelizing convolutional neural networks", 2014; Shoeybi et al., "Megatron-LM", 2019,
section 3, which calls them column parallel and row parallel.)
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

Along: TypeAlias = Literal["outputs", "inputs"]
Gradients: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]"
Wanted: TypeAlias = "tuple[bool, bool, bool]"


class Slice(NamedTuple):
    """What a slice is computed from.

    Attributes:
        number: the slice.
        x: its part of the input.
        weight: its part of the weight; None in the backward pass of a product that does not
            multiply.
        bias: its part of the bias; None without one, and in a backward pass.
    """

    number: int
    x: torch.Tensor
    weight: Any
    bias: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product(abc.ABC):
    """A layer cut into slices, each computed from its parts of the input and of the parameters."""

    slices: int
    along: Along

    # Dimensions, of the input, the weight and the output, that hold features.
    input_dim = -1
    weight_dims = (0, 1)  # its outputs, its inputs
    output_dim = -1

    # Whether kernels compute with the weight's values (and not only copy them).
    multiplies = True

    @property
    def input_parts(self) -> int:
        """How many parts the input is cut into; each is read by `slices // input_parts` slices."""
        return 1 if self.along == "outputs" else self.slices

    @property
    def weight_dim(self) -> int:
        """The dimension of the weight that is cut."""
        return self.weight_dims[self.along == "inputs"]

    @abc.abstractmethod
    def forward(self, given: Slice) -> torch.Tensor:
        """Return the result of a slice: some of the outputs, or a partial result of all."""

    @abc.abstractmethod
    def backward(self, given: Slice, dy: torch.Tensor, wanted: Wanted) -> Gradients:
        """Return the gradients of a slice with respect to its input, weight and bias.

        `dy` is the gradient with respect to the slice's result. Gradients that are not `wanted` are
        None.
        """


class LinearProduct(Product):
    """x of shape (rows, inputs) times a weight of shape (outputs, inputs)."""

    def forward(self, given: Slice) -> torch.Tensor:
        """Return x · weightᵀ + bias."""
        return F.linear(given.x, given.weight, given.bias)

    def backward(self, given: Slice, dy: torch.Tensor, wanted: Wanted) -> Gradients:
        """Return dy · weight, dyᵀ · x, and the sum of dy over the rows."""
        dx = None
        if wanted[0]:
            # One number may pass for a column: then torch's derivative transposes the product.
            by_column = given.x.stride() == (1, len(given.x))
            dx = given.weight.t().mm(dy.t()).t() if by_column else dy.mm(given.weight)
        return (dx, dy.t().mm(given.x) if wanted[1] else None, dy.sum(0) if wanted[2] else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvProduct(Product):
    """x of shape (N, channels, height, width) convolved with a weight of 4 dimensions.

    With groups, a slice has whole groups of the layer, or a part of one.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    input_dim = 1
    output_dim = 1

    @property
    def input_parts(self) -> int:
        """How many parts the input is cut into: with groups, a slice reads those of its groups."""
        return self.slices if self.along == "inputs" else min(self.groups, self.slices)

    @property
    def _groups(self) -> int:
        return max(1, self.groups // self.slices)

    def forward(self, given: Slice) -> torch.Tensor:
        """Return the convolution, plus bias."""
        settings = self.stride, self.padding, self.dilation, self._groups
        return F.conv2d(given.x, given.weight, given.bias, *settings)

    def backward(self, given: Slice, dy: torch.Tensor, wanted: Wanted) -> Gradients:
        """Return the gradients of a convolution."""
        sizes, transposed, output_padding = [len(given.weight)], False, [0, 0]
        settings = self.stride, self.padding, self.dilation, transposed, output_padding
        found: Gradients = torch.ops.aten.convolution_backward(
            dy, given.x, given.weight, sizes, *settings, self._groups, wanted
        )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingProduct(Product):
    """The rows of a weight of shape (rows, features) that the integers x name.

    Cut along its inputs, a slice has some of the rows, and gives zeros for others: each value is
    added to zeros only, which is exact. `rows` is their number in the whole weight.
    """

    rows: int
    padding_idx: int | None
    scale_grad_by_freq: bool

    weight_dims = (1, 0)
    multiplies = False

    @property
    def input_parts(self) -> int:
        """1: every slice reads all of x."""
        return 1

    def forward(self, given: Slice) -> torch.Tensor:
        """Return the slice's part of each row, or the rows that the slice has."""
        if self.along == "outputs":
            return F.embedding(given.x, given.weight)
        local, is_outside = self._local(given)
        return F.embedding(local, given.weight).masked_fill(is_outside.unsqueeze(-1), 0)

    def backward(self, given: Slice, dy: torch.Tensor, wanted: Wanted) -> Gradients:
        """Return the sum of the gradients of each row."""
        if not wanted[1]:
            return None, None, None
        x, rows, padding = given.x, self.rows, -1 if self.padding_idx is None else self.padding_idx
        if self.along == "inputs":
            rows //= self.slices
            x, is_outside = self._local(given)
            dy = dy.masked_fill(is_outside.unsqueeze(-1), 0)
            padding = padding - given.number * rows if padding // rows == given.number else -1
        backward = torch.ops.aten.embedding_dense_backward
        return None, backward(dy, x, rows, padding, self.scale_grad_by_freq), None

    def _local(self, given: Slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of rows in a slice, 0 for rows outside of it, and which those are."""
        rows = self.rows // self.slices
        local = given.x - given.number * rows
        is_outside = (local < 0) | (local >= rows)
        return local.masked_fill(is_outside, 0), is_outside
