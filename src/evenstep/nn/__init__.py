"""Layers that are computed as a fixed number of slices, so that devices can share them."""

from evenstep.nn.convert import slice_, sliced_layers
from evenstep.nn.layers import SlicedConv2d, SlicedEmbedding, SlicedLinear

__all__ = ["SlicedConv2d", "SlicedEmbedding", "SlicedLinear", "slice_", "sliced_layers"]
