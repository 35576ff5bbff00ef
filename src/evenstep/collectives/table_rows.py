"""Gradients of tables as rows: of a large embedding, a shard's backward pass gives those it used.

The gradient of a table is as large as the table, and zero but for the rows that were looked up.
Inside `TableRows`, torch's own kernels compute these rows alone, as if the table had no others.
Autograd gets no gradient from them, so nothing of the table's size is made until `densified` makes
the gradient of the whole batch.

Each row has the bits that it has in the dense gradient, also after sums. That begins as zeros to
which numbers are added, so it has no −0, and nothing changes when zeros are added to it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from evenstep.private_torch import dispatch
from evenstep.private_torch.graph import (
    LEAF,
    backward_pass,
    has_hooks,
    is_sparse_lookup,
    node_here,
    nodes_of,
)
from evenstep.private_torch.modules import gradient_hooks
from evenstep.private_torch.tensors import rows_of

Run: TypeAlias = "Callable[..., torch.Tensor]"

LEAST_BYTES = 1 << 20
"""The size of a table from which on it is worthwhile to look for the rows that were used."""

ROWS_PER_INDEX = 16
"""The rows that a table needs for each index of a shard: else most rows are used in the end."""

_LOOKUPS = ("EmbeddingBackward0", "EmbeddingBagBackward0")
_MAXIMA = 2  # the mode of a bag that gives its largest numbers
_HERE = threading.local()  # .rows: the TableRows of the thread's backward pass
_routes: list[torch.library.Library] = []
_ROUTING = threading.Lock()


class TableRows:
    """Inside `with`, a backward pass gives the gradients of tables as rows.

    It is left to torch where something else might see the gradient: hooks of the parameter, of its
    node of the graph or of the lookup's, or a backward pass inside the backward pass.

    Args:
        root: what the backward pass begins with.
        tables: the parameters to look for: from the `id` of each to its number.

    Attributes:
        found: the gradients by their numbers: sparse, coalesced.
    """

    def __init__(self, root: torch.Tensor, tables: Mapping[int, int]) -> None:
        self.found: dict[int, torch.Tensor] = {}
        self._root = root
        self._tables = tables
        self._task: int | None = None
        self._outer: TableRows | None = None
        self._hook: Any = None

    def __enter__(self) -> TableRows:
        first = self._root.grad_fn
        if self._tables and first is not None:
            if not _routes:
                _route_lookups()
            self._hook = first.register_prehook(self._begin)
            self._outer, _HERE.rows = getattr(_HERE, "rows", None), self
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()
            _HERE.rows = self._outer

    def _begin(self, _: object) -> None:
        self._task = backward_pass()

    def table_here(self, indices: torch.Tensor, rows: int) -> int | None:
        """Return the number of the table whose gradient is being computed; None to leave it."""
        if backward_pass() != self._task:
            return None
        node = node_here()
        if node is None or node.name() not in _LOOKUPS or indices.numel() * ROWS_PER_INDEX > rows:
            return None
        leaf = node.next_functions[0][0]
        parameter: Any = getattr(leaf, "variable", None)
        number = self._tables.get(id(parameter))
        if number is None or gradient_hooks(parameter) or has_hooks(node) or has_hooks(leaf):
            return None
        return number

    def put(self, number: int, gradient: torch.Tensor) -> None:
        """Take rows of a table, behind those of other lookups in the same backward pass."""
        before = self.found.get(number)
        self.found[number] = gradient if before is None else (before + gradient).coalesce()


def tables_in(root: torch.Tensor, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the parameters that a graph uses as large tables only, from their `id`s to numbers.

    Those that it does not use count, too.
    """
    tables = {
        id(one): number
        for number, one in enumerate(parameters)
        if one.dim() == 2 and one.nbytes >= LEAST_BYTES and one.is_cpu and one.is_contiguous()
    }
    for node in nodes_of(root) if tables else ():
        is_lookup = node.name() in _LOOKUPS and not is_sparse_lookup(node)
        for place, (before, _) in enumerate(node.next_functions):
            if before.__class__ is LEAF and not (is_lookup and place == 0):
                tables.pop(id(before.variable), None)
    return tables


def add_rows(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return left + right, each rows or dense; None adds nothing. The memory of both is reused.

    Where one is dense, so is the sum: +0 is added to what the other has no rows for.
    """
    if left is None or right is None:
        return right if left is None else left
    if left.is_sparse and right.is_sparse:
        return (left + right).coalesce()
    return densified(left).add_(densified(right))


def densified(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense tensor: itself, or zeros with its rows."""
    if not gradient.is_sparse:
        return gradient
    return write_rows(gradient, torch.empty(gradient.shape, dtype=gradient.dtype))


def write_rows(gradient: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write rows, and zeros for all others, into a dense tensor; return it."""
    indices, values = rows_of(gradient)
    return out.zero_().index_copy_(0, indices[0], values)


# ---- torch's kernels for dense gradients of tables


def _route_lookups() -> None:
    """Let the kernels for gradients of tables look for a `TableRows`; once in a process.

    These lie below autograd and above those of the devices; outside of `TableRows` they hand the
    call on as it is.
    """
    with _ROUTING:
        if not _routes:
            library = torch.library.Library("aten", "IMPL", "BackendSelect")
            behind = dispatch.keys_after(dispatch.DispatchKey.BackendSelect)
            for name, of_kind in _KINDS.items():
                op = getattr(torch.ops.aten, name).default
                kernel = functools.partial(_gradient, op, of_kind, behind)
                library.impl(op, kernel, with_keyset=True)
            _routes.append(library)


def _gradient(op: Any, of_kind: Callable[..., Any], behind: Any, keys: Any, *args: Any) -> Any:
    run = functools.partial(op.redispatch, keys & behind)
    here: TableRows | None = getattr(_HERE, "rows", None)
    return run(*args) if here is None else of_kind(here, run, *args)


def _of_embedding(
    here: TableRows,
    run: Run,
    grad: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    padding: int,
    by_count: bool,
) -> torch.Tensor | None:
    number = here.table_here(indices, rows)
    if number is None:
        return run(grad, indices, rows, padding, by_count)
    used, renumbered = torch.unique(indices, return_inverse=True)
    values = run(grad, renumbered, len(used), _place_of(padding, used), by_count)
    here.put(number, _sparse(used, values, rows))
    return None  # no gradient


def _of_bag(
    here: TableRows,
    run: Run,
    grad: torch.Tensor,
    indices: torch.Tensor,
    bag_of: torch.Tensor,
    sizes: torch.Tensor,
    maxima: torch.Tensor,
    rows: int,
    by_count: bool,
    mode: int,
    weights: torch.Tensor | None,
    padding: int = -1,
) -> torch.Tensor | None:
    number = None if mode == _MAXIMA else here.table_here(indices, rows)
    rest = by_count, mode, weights
    if number is None:
        return run(grad, indices, bag_of, sizes, maxima, rows, *rest, padding)
    used, renumbered = torch.unique(indices, return_inverse=True)
    given = grad, renumbered.to(indices.dtype), bag_of, sizes, maxima, len(used)
    here.put(number, _sparse(used, run(*given, *rest, _place_of(padding, used)), rows))
    return None


_KINDS: dict[str, Callable[..., Any]] = {
    "embedding_dense_backward": _of_embedding,
    "_embedding_bag_dense_backward": _of_bag,
}


def _place_of(row: int, used: torch.Tensor) -> int:
    """Return the place of a row among those that were used; −1 if it was not."""
    places = (used == row).nonzero()
    return int(places[0]) if len(places) else -1


def _sparse(used: torch.Tensor, values: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        used.to(torch.int64).unsqueeze(0),
        values,
        (rows, values.shape[1]),
        check_invariants=False,
        is_coalesced=True,
    )
