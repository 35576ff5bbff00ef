"""What a model reaches through its attributes may change between steps, as in plain torch."""

import array
import ctypes
import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn

from evenstep import Trainer
from evenstep.errors import ContractError
from layouts import own

LAYOUTS = (1, 3, own(2))


class Distilled(nn.Module):
    """A student with a teacher that `parameters()` does not show."""

    def __init__(self, hide):
        super().__init__()
        self.net = nn.Linear(6, 4)
        hide(self, nn.Linear(6, 4).double().requires_grad_(False))

    def forward(self, x):
        teacher = self.teacher[0] if isinstance(self.teacher, list) else self.teacher
        return self.net(x) - teacher(x)


def in_a_list(model, teacher):
    model.teacher = [teacher]


def past_setattr(model, teacher):
    object.__setattr__(model, "teacher", teacher)


def follow(model):
    teacher = model.teacher[0] if isinstance(model.teacher, list) else model.teacher
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), model.net.parameters(), strict=True):
            old.lerp_(new, 0.5)


def train(make, *, devices=None, change=None, after_update=None, max_in_flight=1):
    """Return the parameters after some steps, by plain torch if there are no devices.

    Args:
        make: returns the model.
        devices: the devices.
        change: called with the model and the step's number, before the step.
        after_update: called with the model after each update.
        max_in_flight: how many steps may be in flight.
    """
    torch.manual_seed(0)
    model, loss = make().double(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = [(torch.randn(32, 6).double(), torch.randint(4, (32,))) for _ in range(5)]
    change = change or (lambda model, number: None)
    if devices is None:
        for number, (X, y) in enumerate(batches):
            change(model, number)
            optimizer.zero_grad()
            loss(model(X), y).backward()
            optimizer.step()
            if after_update:
                after_update(model)
    else:
        given = {"max_in_flight": max_in_flight, "after_update": after_update}
        with Trainer(model, optimizer, loss, devices=devices, **given) as trainer:
            for number, (X, y) in enumerate(batches):
                change(model, number)
                trainer.step(X, y)
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_as_in_plain_torch(make, **given):
    one, *others = [train(make, devices=devices, **given) for devices in LAYOUTS]
    torch.testing.assert_close(one, train(make, **given))
    for other in others:
        assert all(map(torch.equal, other, one))


@pytest.mark.parametrize("hide", [in_a_list, past_setattr])
def test_a_hidden_teacher_that_follows_the_student(hide):
    def make():
        return Distilled(hide)

    assert_as_in_plain_torch(make, after_update=follow)
    assert_as_in_plain_torch(make, change=lambda model, number: follow(model))
    with pytest.raises(ContractError, match="after_update has changed what an attribute holds"):
        train(make, devices=2, after_update=follow, max_in_flight=2)


def test_a_hidden_teacher_that_stays_does_not_make_the_copies_again():
    model = Distilled(in_a_list).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=2) as trainer:
        trainer.step(torch.randn(32, 6).double(), torch.randint(4, (32,)))
        copies = [id(replica.module) for replica in trainer._replicas.all]
        for _ in range(3):
            trainer.step(torch.randn(32, 6).double(), torch.randint(4, (32,)))
        assert [id(replica.module) for replica in trainer._replicas.all] == copies


class Schedule:
    """A factor that follows the step, in an attribute that Python renames."""

    __slots__ = ("__factor",)

    def __init__(self):
        self.set(1.0)

    def set(self, factor):
        self.__factor = factor

    def value(self):
        return self.__factor


class Pair(ctypes.Structure):
    _fields_ = (("one", ctypes.c_double), ("other", ctypes.c_double))


def set_in(key):
    return lambda held, factor: held.__setitem__(key, factor)


def unmask(held, factor):
    held.mask[0] = factor < 0.5


HOLDERS = {  # what an attribute holds, how it gives a factor, and how this is changed
    "a bound method": (
        lambda: Schedule().value,
        lambda held: held(),
        lambda held, factor: held.__self__.set(factor),
    ),
    "a partial of one": (
        lambda: functools.partial(Schedule().value),
        lambda held: held(),
        lambda held, factor: held.func.__self__.set(factor),
    ),
    "a private slot": (Schedule, Schedule.value, Schedule.set),
    "array.array": (lambda: array.array("d", [1.0]), lambda held: held[0], set_in(0)),
    "a value of ctypes": (
        lambda: ctypes.c_double(1.0),
        lambda held: held.value,
        lambda held, factor: setattr(held, "value", factor),
    ),
    "a structure of ctypes": (
        Pair,
        lambda held: 1.0 + held.other,
        lambda held, factor: setattr(held, "other", factor),
    ),
    "a matrix": (lambda: np.ones((1, 1)).view(np.matrix), lambda held: held[0, 0], set_in((0, 0))),
    "a masked array": (lambda: np.ma.array([1.0]), lambda held: held[0], set_in(0)),
    "its mask": (
        lambda: np.ma.array([3.0], mask=[False]),
        lambda held: held.filled(0.5)[0],
        unmask,
    ),
    "an array of objects": (
        lambda: np.array([[1.0]], dtype=object),
        lambda held: held[0, 0],
        set_in((0, 0)),
    ),
    "in an array of objects": (
        lambda: np.array([Schedule()], dtype=object),
        lambda held: held[0].value(),
        lambda held, factor: held[0].set(factor),
    ),
    "a bytearray": (
        lambda: bytearray([1]),
        lambda held: held[0] / 100,
        lambda held, factor: held.__setitem__(0, int(100 * factor)),
    ),
}


class Scaled(nn.Module):
    def __init__(self, held, read):
        super().__init__()
        self.net, self.held, self.read = nn.Linear(6, 4), held, read

    def forward(self, x):
        return self.net(x) * float(self.read(self.held))


@pytest.mark.parametrize(("make", "read", "write"), HOLDERS.values(), ids=HOLDERS)
def test_an_object_that_changes_in_place(make, read, write):
    def change(model, number):
        write(model.held, 1 / (1 + number))

    assert_as_in_plain_torch(lambda: Scaled(make(), read), change=change)


class Masked(nn.Module):
    """Keeps a mask in an attribute of its weight, as code that prunes does."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, x):
        mask = getattr(self.net.weight, "mask", 1.0)
        return nn.functional.linear(x, self.net.weight * mask, self.net.bias)


def set_mask(model, number):
    if number != 1:
        model.net.weight.mask = (torch.arange(24).view(4, 6) % 6 >= number).double()


def write_mask(model, number):
    if number == 0:
        model.net.weight.mask = torch.ones(4, 6).double()
    else:
        model.net.weight.mask[:, number] = 0


def add_mask(model, number):
    if number == 2:
        set_mask(model, number)
    if number == 4:
        del model.net.weight.mask


@pytest.mark.parametrize("change", [set_mask, write_mask, add_mask])
def test_an_attribute_of_a_parameter(change):
    assert_as_in_plain_torch(Masked, change=change)
    in_flight = train(Masked, devices=2, change=change, max_in_flight=2)
    assert all(map(torch.equal, in_flight, train(Masked, devices=1, change=change)))


def test_an_attribute_of_a_parameter_that_after_update_writes_in_flight_is_refused():
    numbers = iter(range(10))
    with pytest.raises(ContractError, match="after_update has changed what an attribute holds"):
        train(
            Masked,
            devices=2,
            after_update=lambda model: set_mask(model, next(numbers)),
            max_in_flight=2,
        )


class Tied(nn.Module):
    """Its weight leads to a buffer, to its layer, and to what can't be copied."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.net.weight.calls, self.net.weight.layer = self.calls, self.net
        self.net.weight.lock = threading.Lock()

    def forward(self, x):
        self.calls += 1
        return self.net.weight.layer(x) * self.net.weight.calls


def test_attributes_of_a_parameter_lead_to_parts_of_the_same_copy():
    model = Tied()
    with Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss(), devices=2
    ) as trainer:
        copied = trainer._replicas.all[1].module
        assert copied.net.weight.calls is copied.calls
        assert copied.net.weight.layer is copied.net
        assert copied.net.weight.lock is model.net.weight.lock


class Centred(nn.Module):
    """Subtracts a buffer in a function that has the module in its closure."""

    def __init__(self, kind):
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))
        if kind == "hook":
            self.net.register_forward_pre_hook(lambda module, given: (given[0] - self.mean,))
        elif kind == "attribute":
            self.centre = lambda x: x - self.mean
        else:
            seen = []
            self.net.register_forward_hook(lambda *given: seen.append(self))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.net(getattr(self, "centre", lambda x: x)(x))


@pytest.mark.parametrize("kind", ["hook", "attribute"])
def test_a_function_that_reads_a_buffer_from_its_closure_is_refused_with_copies(kind):
    train(lambda: Centred(kind), devices=1)
    with pytest.raises(ContractError, match=r"<lambda>, which reads the buffer mean from its clos"):
        train(lambda: Centred(kind), devices=2)


def test_a_hook_that_only_has_the_module_in_its_closure_is_not_refused():
    model = Centred("neither")
    model.net.register_forward_hook(lambda *given: model.net.weight.mean() and None)
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss(), devices=2)
