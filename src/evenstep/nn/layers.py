"""Linear, Conv2d and Embedding, computed as S slices.

S and the direction of the cut belong to the experiment: they decide how values are computed, as V
does. Which device computes a slice doesn't change a bit. With one slice, a layer is torch's own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from evenstep.errors import ModelError, shown
from evenstep.nn.products import Along, ConvProduct, EmbeddingProduct, LinearProduct
from evenstep.nn.sliced import compute_sliced


class Sliced(nn.Module):
    """What the sliced layers have in common."""

    slices: int
    along: Along

    cut_names: ClassVar[tuple[str, str]]
    """The names of the sizes that are cut along the outputs, and along the inputs."""

    def cut(self, slices: int, along: Along, name: str = "") -> None:
        """Have the layer computed as `slices` slices.

        Args:
            slices: S.
            along: which features are cut.
            name: the layer's name in the model, for messages.

        Raises:
            ModelError: it can't be cut so.
        """
        self.slices, self.along = slices, along
        kind = type(self).__name__.removeprefix("Sliced")
        place = f"{name} ({kind})" if name else f"a {kind} layer"
        if along not in ("outputs", "inputs"):
            raise ModelError(f"got along={shown(along)}: give 'outputs' or 'inputs'")
        if not isinstance(slices, int) or isinstance(slices, bool) or slices < 1:
            raise ModelError(f"got slices={shown(slices)}: give an integer of at least 1")
        if slices == 1:
            return
        what = self.cut_names[along == "inputs"]
        size = getattr(self, what)
        if size % slices:
            raise ModelError(
                f"{place} can't be cut into {slices} slices: {slices} does not divide its "
                f"{what}={size}; use a different number of slices for it, or leave it whole"
            )
        refusal = self.refusal()
        if refusal:
            raise ModelError(f"{place} can't be cut into {slices} slices: {refusal}")

    def refusal(self) -> str:
        """Return why the layer can't be cut; "" if it can."""
        weight = self.weight
        is_complex = isinstance(weight, torch.Tensor) and weight.is_complex()
        return "its weight is complex" if is_complex else ""

    def extra_repr(self) -> str:
        """Return the layer's settings."""
        return f"{super().extra_repr()}, slices={self.slices}, along={self.along!r}"


class SlicedLinear(Sliced, nn.Linear):
    """A `torch.nn.Linear` computed as S slices.

    Along its outputs, slice k computes the outputs k · out/S to (k + 1) · out/S; the gradient with
    respect to the input is summed over the slices in the canonical tree. Along its inputs, slice k
    reads the inputs k · in/S to (k + 1) · in/S; the partial results are summed in the tree, and the
    bias is added after. (Shoeybi et al., "Megatron-LM", 2019, section 3: column and row parallel.)

    Parameters, their names, shapes and first values are those of `torch.nn.Linear`.

    Args:
        in_features: as for `torch.nn.Linear`.
        out_features: as for `torch.nn.Linear`.
        bias: as for `torch.nn.Linear`.
        device: as for `torch.nn.Linear`.
        dtype: as for `torch.nn.Linear`.
        slices: S; it must divide the features that are cut. Part of the experiment.
        along: "outputs" or "inputs": which features are cut. Part of the experiment.

    Raises:
        ModelError: the layer can't be cut so.
    """

    cut_names = "out_features", "in_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        slices: int,
        along: Along = "outputs",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.cut(slices, along)

    def product(self) -> LinearProduct:
        """Return the arithmetic of a slice."""
        return LinearProduct(slices=self.slices, along=self.along)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the output, of shape (..., out_features), for an input (..., in_features)."""
        if self.slices == 1:
            return nn.Linear.forward(self, input)
        rows = input.reshape(1, -1) if input.dim() == 1 else input.flatten(0, -2)
        output = compute_sliced(self.product(), rows, self.weight, self.bias)
        return output.reshape(*input.shape[:-1], self.out_features)


class SlicedConv2d(Sliced, nn.Conv2d):
    """A `torch.nn.Conv2d` computed as S slices.

    Along its outputs, a slice computes out/S output channels; with groups, it has whole groups, or
    a part of one group, and reads only the input channels of these. (Krizhevsky, "One weird trick
    for parallelizing convolutional neural networks", 2014.) Along its inputs, a slice reads in/S
    input channels and gives a partial result, as in `SlicedLinear`.

    Parameters, their names, shapes and first values are those of `torch.nn.Conv2d`.

    Args:
        in_channels: as for `torch.nn.Conv2d`.
        out_channels: as for `torch.nn.Conv2d`.
        kernel_size: as for `torch.nn.Conv2d`.
        slices: S; it must divide the channels that are cut. Part of the experiment.
        along: "outputs" or "inputs": which channels are cut. Part of the experiment.
        others: the further arguments of `torch.nn.Conv2d`, all of which are supported; with groups
            only along="outputs", and one of S and groups must divide the other.

    Raises:
        ModelError: the layer can't be cut so.
    """

    cut_names = "out_channels", "in_channels"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        *others: Any,
        slices: int,
        along: Along = "outputs",
        **named: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, *others, **named)
        self.cut(slices, along)

    def refusal(self) -> str:
        """Return why the layer can't be cut; "" if it can."""
        groups = self.groups
        if groups > 1 and self.along == "inputs":
            return f"it has groups={groups}, which along='inputs' does not support: cut its outputs"
        if self.slices % groups and groups % self.slices:
            return f"slices would have parts of several of its {groups} groups: use {groups} slices"
        return super().refusal()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the convolution of images (N, channels, height, width), or of a single one."""
        if self.slices == 1:
            return nn.Conv2d.forward(self, input)
        images = input if input.dim() == 4 else input.unsqueeze(0)
        images, padding = self._padded(images)
        product = ConvProduct(
            slices=self.slices,
            along=self.along,
            stride=(self.stride[0], self.stride[1]),
            padding=padding,
            dilation=(self.dilation[0], self.dilation[1]),
            groups=self.groups,
        )
        output = compute_sliced(product, images, self.weight, self.bias)
        return output if input.dim() == 4 else output.squeeze(0)

    def _padded(self, images: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the images with the padding that kernels don't support, and the rest of it."""
        left, right, top, bottom = self._reversed_padding_repeated_twice
        if self.padding_mode == "zeros" and (left, top) == (right, bottom):
            return images, (top, left)
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(images, [left, right, top, bottom], mode=mode), (0, 0)


class SlicedEmbedding(Sliced, nn.Embedding):
    """A `torch.nn.Embedding` computed as S slices.

    Along its outputs, a slice has embedding_dim/S features of every row. Along its inputs, it has
    num_embeddings/S rows, and gives zeros for the others; the sum of the slices is exact, but for
    -0.0, which becomes 0.0.

    The weight, its name, shape and first values are those of `torch.nn.Embedding`.

    Args:
        num_embeddings: as for `torch.nn.Embedding`.
        embedding_dim: as for `torch.nn.Embedding`.
        padding_idx: as for `torch.nn.Embedding`.
        slices: S; it must divide the features, or rows, that are cut. Part of the experiment.
        along: "outputs" (features) or "inputs" (rows): what is cut. Part of the experiment.
        others: further arguments of `torch.nn.Embedding`, by name, but for `max_norm` and
            `sparse=True`, and for `scale_grad_by_freq=True` along the inputs.

    Raises:
        ModelError: the layer can't be cut so.
    """

    cut_names = "embedding_dim", "num_embeddings"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        slices: int,
        along: Along = "outputs",
        **others: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, **others)
        self.cut(slices, along)

    def refusal(self) -> str:
        """Return why the layer can't be cut; "" if it can."""
        if self.max_norm is not None:
            return f"it has max_norm={self.max_norm}, which writes to the weight in forward"
        if self.sparse:
            return "it has sparse=True, and slices have dense gradients: leave sparse out"
        if self.scale_grad_by_freq and self.along == "inputs":
            return (
                "it has scale_grad_by_freq=True, which along='inputs' does not support: cut its "
                "outputs"
            )
        return super().refusal()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the rows that the integers in `input` name, of shape (..., embedding_dim)."""
        if self.slices == 1:
            return nn.Embedding.forward(self, input)
        if self.along == "inputs" and not torch.compiler.is_compiling():
            self._refuse_outside(input)
        product = EmbeddingProduct(
            slices=self.slices,
            along=self.along,
            rows=self.num_embeddings,
            padding_idx=self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )
        return compute_sliced(product, input, self.weight, None)

    def _refuse_outside(self, rows: torch.Tensor) -> None:
        """Refuse rows that no slice has, as torch's own layer does."""
        if rows.numel():
            least, most = (int(one) for one in torch.aminmax(rows))
            if least < 0 or most >= self.num_embeddings:
                raise IndexError(
                    f"index {least if least < 0 else most} is out of range: the embedding has "
                    f"{self.num_embeddings} rows"
                )
