"""The tables of functions by name: those of `nd`, and those of `np` with `npx`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from evenstep.mxnet.ops import elementwise, layers, reductions, shapes

Table = Mapping[str, Callable[..., Any]]

ND: Table = {**elementwise.ND, **reductions.ND, **shapes.ND, **layers.ND}
NPX: Table = {**layers.NPX, **shapes.NPX, "topk": reductions.COMMON["topk"]}
NPX = {**NPX, "batch_dot": reductions.batch_dot, "smooth_l1": elementwise.smooth_l1}
NP: Table = {**elementwise.NP, **reductions.NP, **shapes.NP}
