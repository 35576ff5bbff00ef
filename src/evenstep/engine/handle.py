"""Handles of results that are not computed yet, and `Var`, mutable state that tasks share.

`result`, `item`, `numpy`, `float` and `print` wait for the value: they are the synchronising
functions of Dive into Deep Learning, "Asynchronous Computation".
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import optree
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin

from evenstep.engine.graph import Place
from evenstep.engine.task import Source, Task
from evenstep.errors import InputError, hides_own_frames


class Pending(Source):
    """A value that tasks may still be computing."""

    __slots__ = ()

    def wait_to_read(self) -> None:
        """Block until the value is computed.

        Raises:
            Exception: the error of the task that failed to compute it, with its traceback and
                story.
            DeadlockError: called inside a task, whose lane the awaited task might need.
        """
        raise NotImplementedError

    @hides_own_frames
    def result(self) -> Any:
        """Wait, and return the value."""
        self.wait_to_read()
        return self.value_in_task()

    @hides_own_frames
    def item(self) -> Any:
        """Wait, and return the value as a Python number."""
        value = self.result()
        return value.item() if hasattr(value, "item") else value

    @hides_own_frames
    def numpy(self) -> np.ndarray[Any, Any]:
        """Wait, and return the value as a numpy array (a tensor on a GPU is copied)."""
        value = self.result()
        return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)

    @hides_own_frames
    def __float__(self) -> float:
        return float(self.result())

    def __int__(self) -> int:
        return int(self.result())

    def __bool__(self) -> bool:
        return bool(self.result())

    def __str__(self) -> str:
        return str(self.result())

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec else self.result(), spec)


def _comparison(compare: Callable[[Any, Any], Any], numpys: np.ufunc) -> Callable[..., Any]:
    """Return a method that compares as a number does; numpy would give tensors of 0 and 1."""

    def method(self: PendingNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return compare(self.item(), other)
        return numpys(self, other)

    return method


class PendingNumber(NDArrayOperatorsMixin, Pending):
    """A pending value that is one number, and can be used like one; each use waits for it.

    Operators, comparisons, `round`, `sum` and numpy's functions give Python numbers (or arrays, if
    they are given one too); TensorBoard's `add_scalar` takes it. Functions of torch take it as a
    scalar tensor on the CPU, without a graph. A copy is the number; pickled, it is a scalar tensor
    with all of its digits, which `torch.load` reads, as it would not read a class of evenstep's.
    """

    __slots__ = ()
    __lt__ = _comparison(operator.lt, np.less)
    __le__ = _comparison(operator.le, np.less_equal)
    __eq__ = _comparison(operator.eq, np.equal)
    __ne__ = _comparison(operator.ne, np.not_equal)
    __gt__ = _comparison(operator.gt, np.greater)
    __ge__ = _comparison(operator.ge, np.greater_equal)

    def __hash__(self) -> int:
        return hash(self.item())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _on_cpu(self.item()).__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return self.item()

    def __deepcopy__(self, memo: object) -> Any:
        return self.item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.item(), dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        values = [one.item() if isinstance(one, PendingNumber) else one for one in inputs]
        result = getattr(ufunc, method)(*values, **options)
        return result.item() if isinstance(result, np.generic) else result

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        asked: Any = (tuple(args), dict(kwargs or {}))
        given = optree.tree_map(_as_scalar, asked, none_is_leaf=True)
        if torch.is_grad_enabled() and any(map(_has_graph, optree.tree_leaves(given))):
            raise InputError(
                "the loss of a step is a number that has no graph, so a backward pass through what "
                "is computed with it would not reach the model: use float(loss), or add the other "
                "term in the objective"
            )
        return function(*given[0], **given[1])

    def __dlpack__(self, **options: Any) -> Any:
        return self.detach().__dlpack__(**options)  # which torch.tensor asks for

    def __dlpack_device__(self) -> Any:
        return self.detach().__dlpack_device__()

    def detach(self) -> torch.Tensor:
        """Wait, and return the value as a scalar tensor on the CPU."""
        return torch.tensor(self.item(), device="cpu")

    def cpu(self) -> torch.Tensor:
        """Wait, and return the value as a scalar tensor on the CPU."""
        return self.detach()

    @property
    def data(self) -> torch.Tensor:
        """The value as a scalar tensor on the CPU; waits."""
        return self.detach()

    def mean(self, **numpys: Any) -> Any:
        """Wait, and return the value, which is its own mean, as a scalar tensor on the CPU."""
        return np.mean(self.item(), **numpys) if numpys else self.detach()

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.item(), digits)


def _on_cpu(number: Any) -> torch.Tensor:
    """Return a number as a scalar tensor, without rounding it."""
    dtype = torch.float64 if isinstance(number, float) else None
    return torch.tensor(number, dtype=dtype, device="cpu")


def _as_scalar(value: Any) -> Any:
    return value.detach() if isinstance(value, PendingNumber) else value


def _has_graph(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


numbers.Number.register(PendingNumber)  # what numpy and TensorBoard ask for


class Handle(Pending):
    """The result of a task; as an argument of another task it is a dependency."""

    __slots__ = ("_wait", "task")

    def __init__(self, task: Task, wait: Callable[[Task], None]) -> None:
        self.task = task
        self._wait = wait

    def value_in_task(self) -> Any:
        """Return the result; called only once the task has ended."""
        return self.task.result

    def wait_to_read(self) -> None:
        """Block until the task has ended; raise its error."""
        self._wait(self.task)

    @property
    def description(self) -> str:
        """The task whose result it is."""
        return f"the result of {self.task.name!r} (number {self.task.number})"

    @property
    def done(self) -> bool:
        """Whether the task has ended. Does not wait."""
        return self.task.ended

    def __repr__(self) -> str:
        return f"Handle({self.result()!r})"


class Var(Place, Pending):
    """Mutable state that tasks read and write in the order of submission.

    As an argument of a task it arrives as its value. A task that changes the value names the Var in
    `writes`; one that only reads it names it in `reads`, or takes it as an argument. If a writer
    fails, the value is undefined and later tasks that use the Var fail too: create a new Var.

    Attributes:
        name: its name in stories.
        written: on an accelerator, the event behind the kernels of the last task that wrote it.
        fences: those of the tasks that have read it since.
    """

    __slots__ = ("_value", "_wait", "fences", "name", "written")

    def __init__(self, value: Any, name: str, wait: Callable[[Var], None]) -> None:
        super().__init__()
        self.name = name
        self.written: Any = None
        self.fences: list[Any] = []
        self._value = value
        self._wait = wait

    def value_in_task(self) -> Any:
        """Return the value; called only while no task writes it."""
        return self._value

    @property
    def description(self) -> str:
        """Its name."""
        return self.name

    def wait_to_read(self) -> None:
        """Block until every task submitted so far that writes it has ended."""
        self._wait(self)

    def __repr__(self) -> str:
        return f"Var({self.result()!r})"


class MissingName:
    """A name that a class does not have, and what to write instead of it.

    It is a class attribute that raises AttributeError, so `hasattr` is false. Unlike `__getattr__`
    it takes no time when other attributes are read, and hides no error in a property.

    Args:
        advice: what to write, and why.
        owner: what does not have the name; None for the name of the class.
    """

    def __init__(self, advice: str, owner: str | None = None) -> None:
        self._advice = advice
        self._owner = owner

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{self._owner or owner.__name__} has no {self._name}: {self._advice}")
