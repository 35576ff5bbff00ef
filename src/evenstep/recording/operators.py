"""Sees each operator of torch that a model calls, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from evenstep.private_torch.dispatch import TorchDispatchMode

Note: TypeAlias = Callable[[str, list[Any], Any, bool], None]
"""Takes an operator's name, what was kept of its inputs, its outputs, and whether it drew."""

_OF_EXCHANGES = ("c10d", "_c10d_functional")
"""Operators whose outputs are not there yet when they return."""


class Operators(TorchDispatchMode):
    """Inside `with`, each operator of this thread is noted.

    Args:
        keep: returns what is kept of an operator's inputs, before it runs: it may change them.
        note: is called after each operator.
    """

    def __init__(self, keep: Callable[[Any], list[Any]], note: Note) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keep, self._note = keep, note

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        """Run an operator, and note it."""
        keywords = keywords or {}
        if function.namespace in _OF_EXCHANGES:
            return function(*arguments, **keywords)
        inputs = self._keep((arguments, keywords))
        outputs = function(*arguments, **keywords)
        draws = torch.Tag.nondeterministic_seeded in function.tags
        self._note(str(function).removesuffix(".default"), inputs, outputs, draws)
        return outputs
