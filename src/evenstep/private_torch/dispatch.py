"""How torch finds the kernel of an op: modes that see all ops, kernels before the usual one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from evenstep.private_torch.names import attribute, private

_FRAMES = "keep Dynamo from tracing what looks at each op of the first check"
_NUMBERS = "give each shard the random numbers of its own generator"
_MODES = "refuse modes around a step, which don't reach the threads that compute shards"

if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    DispatchKey = private("torch._C", "DispatchKey", _NUMBERS)
    TorchDispatchMode = private(
        "torch.utils._python_dispatch", "TorchDispatchMode", "check the ops of the first step"
    )


_skip_code: Callable[[Any], object] = private(
    "torch._C._dynamo.eval_frame",
    "skip_code",
    _FRAMES,
    public_way=lambda code: None,
    in_recommended=False,
)


class OpsMode(TorchDispatchMode):
    """Base of modes that see the ops of the calling thread.

    Functions that the user has compiled stay compiled inside. Otherwise Dynamo would skip them,
    there and in every shard after it.

    torch wraps `__torch_dispatch__` for its compiler, which takes as long as a small op. Here
    Dynamo skips the method instead.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls, **options: Any) -> None:
        method: Any = cls.__torch_dispatch__
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        _skip_code(method.__code__)
        cls.__torch_dispatch__ = method  # type: ignore[method-assign]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled functions run as ever: yes."""
        return True


# ---- modes of the calling thread

dispatch_modes: Callable[[], list[Any]] = private(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", _MODES
)
"""Return the modes below autograd."""

function_modes: Callable[[], list[Any]] = private(
    "torch.overrides", "_get_current_function_mode_stack", _MODES
)
"""Return the modes above autograd, such as a default device."""

DeviceContext: Any = private("torch.utils._device", "DeviceContext", _MODES)
"""The mode that a default device is."""

count_dispatch_modes: Callable[[], int] = private(
    "torch._C", "_len_torch_dispatch_stack", _MODES, public_way=lambda: len(dispatch_modes())
)
count_function_modes: Callable[[], int] = private(
    "torch._C", "_len_torch_function_stack", _MODES, public_way=lambda: len(function_modes())
)


# ---- ops

all_ops: Callable[[], Sequence[str]] = private("torch._C", "_dispatch_get_all_op_names", _NUMBERS)
"""Return the names of all ops, such as "aten::randn.generator"."""

has_kernel: Callable[[str, str], bool] = private(
    "torch._C", "_dispatch_has_kernel_for_dispatch_key", _NUMBERS
)
"""Return whether an op, given by its name, has a kernel for a key."""


def _loaded(name: str, overload: str) -> tuple[object, object, Sequence[torch.Tag]]:
    namespace, _, packet = name.partition("::")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return None, None, found.tags


_overload_of: Callable[[str, str], tuple[Any, Any, Sequence[torch.Tag]]] = private(
    "torch._C", "_get_operation_overload", _NUMBERS, public_way=_loaded
)


def tags_of(name: str) -> Sequence[torch.Tag]:
    """Return the tags of an op, given by its name.

    `torch.ops` makes an object of an op when it is first named, which takes twenty times as long.
    """
    packet, _, overload = name.partition(".")
    return _overload_of(packet, overload)[2]


keys_after: Callable[[Any], Any] = private("torch._C", "_dispatch_keyset_full_after", _NUMBERS)
"""Return the keys of the kernels that a call reaches behind that of a key."""

_schema_of = attribute(torch.ops.aten.randn.default, "_schema", _NUMBERS)
_kernel_of = attribute(torch.ops.aten.randn.default, "_op_dk", "see which numbers an op draws")


def arguments_of(op: Any) -> Sequence[Any]:
    """Return what an op takes: each with `name` and, where it has one, `default_value`."""
    arguments: Sequence[Any] = _schema_of(op).arguments
    return arguments


def written_by(op: Any) -> list[tuple[int, str]]:
    """Return the places and names of the arguments that an op writes to."""
    arguments = enumerate(arguments_of(op))
    return [(place, one.name) for place, one in arguments if one.is_write]


def returns_of(op: Any) -> list[tuple[int, str] | None]:
    """Return for each result of an op place and name of the argument that it is; None if new."""
    arguments = [(place, one) for place, one in enumerate(arguments_of(op)) if one.is_write]
    found: list[tuple[int, str] | None] = []
    for result in _schema_of(op).returns:
        marks = result.alias_info.before_set if result.alias_info is not None else set()
        same = [(at, one.name) for at, one in arguments if marks & one.alias_info.before_set]
        found.append(same[0] if same else None)
    return found


def run_kernel(op: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that an op has for a key."""
    return _kernel_of(op)(key, *args, **kwargs)


DataDependentOutput: type[Exception] = private(
    "torch._subclasses.fake_tensor",
    "DataDependentOutputException",
    "know ops whose shapes depend on values",
    public_way=RuntimeError,
)
