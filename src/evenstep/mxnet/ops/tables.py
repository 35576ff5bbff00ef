"""The tables of functions by name: those of `nd`, and those of `np` with `npx`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from evenstep.mxnet.ops import elementwise, layers, reductions, shapes

Table = Mapping[str, Callable[..., Any]]

ND: Table = {**elementwise.ND, **reductions.ND, **shapes.ND, **layers.ND}
NPX: Table = {**layers.NPX, **shapes.NPX, "topk": reductions.COMMON["topk"]}
NPX = {**NPX, "batch_dot": reductions.batch_dot, "smooth_l1": elementwise.smooth_l1}
NP: Table = {**elementwise.NP, **reductions.NP, **shapes.NP}


def missing(module: str, name: str, there: list[str]) -> str:
    """Return the message on a name that is not there, with the names that are close to it."""
    close = difflib.get_close_matches(name.lower(), there, n=5, cutoff=0.6)
    close += [one for one in there if name.lower() in one.lower() and one not in close][:5]
    hint = f"close to it: {', '.join(close)}; " if close else ""
    return (
        f"evenstep.mxnet.{module} has no {name!r}: {hint}`dir({module})` lists all "
        f"{len(there)} names, and mx.operation(torch.erfc) makes any function of torch one"
    )
