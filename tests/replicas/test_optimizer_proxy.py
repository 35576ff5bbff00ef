"""Changes to the optimizer while steps are in flight have the same effect as one step at a time."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from evenstep.errors import ContractError
from evenstep.replicas import OptimizerProxy
from in_flight import DEVICES, assert_same_as_one_at_a_time, numbered, opened
from optimizers import OPTIMIZERS, SETTINGS, model_for
from owned_optimizers import OWN_LISTS, OwnList
from reference import assert_same_bits, reference_training, whole_state
from trainers import open_trainer, sgd
from zoo import build, make_batches

on_devices = pytest.mark.parametrize("devices", DEVICES, ids=str)


def nothing(trainer, number, loss):
    pass


def two_groups(model):
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.02}, {"params": rest}], lr=0.1)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


class Counting(torch.optim.Optimizer):
    """An optimizer that keeps counters in its groups, as Prodigy and schedule-free do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "weight": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight"] = group["weight"] + group["lr"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * float(group["weight"]) / group["k"])


def counting(model):
    return Counting(model.parameters())


# Schedulers


SCHEDULERS = {
    "one cycle": (sgd, lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=7)),
    "one cycle, Adam": (adam, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=7)),
    "one cycle of two groups": (
        two_groups,
        lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.3], total_steps=7),
    ),
    "cosine": (sgd, lambda o: lr_scheduler.CosineAnnealingLR(o, 4)),
    "functions": (
        two_groups,
        lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.5**n, lambda n: 1 / (n + 1)]),
    ),
    "exponential, with counters": (counting, lambda o: lr_scheduler.ExponentialLR(o, 0.7)),
}


# Each scheduler on one kind of devices, each kind with two schedulers.
@pytest.mark.parametrize(("name", "devices"), [*zip(SCHEDULERS, DEVICES * 2, strict=True)])
def test_a_scheduler_stepped_after_every_step(name, devices):
    """Also tests that nothing warns: warnings are errors here."""

    def act(trainer, number, loss):
        trainer.scheduler.step()

    make_optimizer, make_scheduler = SCHEDULERS[name]
    _, _, groups = assert_same_as_one_at_a_time(
        devices, act, make_optimizer=make_optimizer, make_scheduler=make_scheduler
    )
    assert groups[0]["lr"] != groups[0]["initial_lr"]


@on_devices
def test_a_scheduler_that_looks_at_the_loss(devices):
    def act(trainer, number, loss):
        trainer.scheduler.step(float(loss))

    def make_scheduler(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.2)

    _, _, groups = assert_same_as_one_at_a_time(
        devices, act, waits="before", make_scheduler=make_scheduler
    )
    assert groups[0]["lr"] < 0.1


# Hyper-parameters that users set themselves


def write_groups(at):
    def act(trainer, number, loss):
        if number == at:
            trainer.optimizer.param_groups[1].update(lr=0.7, weight_decay=0.1, mine=["note"])
        if number == 3:
            trainer.optimizer.param_groups[0]["momentum"] = 0.5

    return act


def halve_rate(trainer, number, loss):
    trainer.optimizer.param_groups[0]["lr"].mul_(0.5)


def set_rate(trainer, number, loss):
    if number == 3:
        trainer.optimizer.param_groups[0]["lr"] = 0.05


def reset_counter(trainer, number, loss):
    if number == 2:
        trainer.waitall()
        trainer.optimizer.param_groups[0]["k"] = 0


def add_parameter(trainer, number, loss):
    if number == 3:
        extra = nn.Parameter(torch.ones(2))
        trainer.model[0].register_parameter("extra", extra)
        trainer.optimizer.add_param_group({"params": extra})
        trainer.waitall()


def with_tensor_rate(model):
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.4), momentum=0.9)


# What is done after each step, to which optimizer, and a value in its first group at the end.
WRITES = {
    "groups after step 1": (write_groups(1), two_groups, {"momentum": 0.5}),
    "groups after step 2": (write_groups(2), two_groups, {"momentum": 0.5}),
    "a tensor as learning rate": (halve_rate, with_tensor_rate, {"lr": 0.4 * 0.5**6}),
    "a rate beside counters": (set_rate, counting, {"k": 6}),
    "counters, after waitall": (reset_counter, counting, {"k": 3}),
    "a group, before waitall": (add_parameter, counting, {"k": 6}),
}


@on_devices
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.thinned(2)
def test_hyper_parameters_written_between_steps(devices, name):
    act, make_optimizer, at_the_end = WRITES[name]
    waits = "before" if "waitall" in name else False
    _, _, groups = assert_same_as_one_at_a_time(
        devices, act, make_optimizer=make_optimizer, waits=waits
    )
    assert at_the_end.items() <= groups[0].items()


@on_devices
@pytest.mark.parametrize(
    ("make_optimizer", "waitall"), [(sgd, True), (adam, False), (counting, True), (counting, False)]
)
@pytest.mark.thinned(2)
def test_a_state_loaded_between_steps(devices, make_optimizer, waitall):
    saved = {}

    def act(trainer, number, loss):
        if number == 0:
            trainer.gates.release(number)
            trainer.waitall()
            saved[trainer] = copy.deepcopy(trainer.optimizer.state_dict())
            saved[trainer]["param_groups"][0]["lr"] = 0.03
        if number == 3:
            trainer.optimizer.load_state_dict(saved[trainer])
            if waitall:
                trainer.gates.release(number)
                trainer.waitall()

    _, _, groups = assert_same_as_one_at_a_time(
        devices, act, make_optimizer=make_optimizer, waits=True
    )
    assert groups[0]["lr"] == 0.03


@on_devices
@pytest.mark.parametrize("make_optimizer", [two_groups, adam, counting])
def test_a_group_added_between_steps(devices, make_optimizer):
    """A fine-tuner thaws a layer."""

    def without_head(model):
        model[4].requires_grad_(False)
        optimizer = make_optimizer(model)
        head = {id(parameter) for parameter in model[4].parameters()}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in head]
        return optimizer

    def act(trainer, number, loss):
        if number == 3:
            trainer.model[4].requires_grad_(True)
            trainer.optimizer.add_param_group({"params": trainer.model[4].parameters()})

    assert_same_as_one_at_a_time(devices, act, make_optimizer=without_head, waits=True)


# Gradients that the user drops


@on_devices
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
@pytest.mark.thinned(2)
def test_zero_grad_between_steps_changes_nothing(devices, whose, set_to_none):
    def act(trainer, number, loss):
        getattr(trainer, whose).zero_grad(set_to_none)

    assert_same_as_one_at_a_time(devices, act)


@on_devices
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_the_middle_of_an_update_changes_nothing(devices, set_to_none):
    """The user's `zero_grad` comes just before the optimizer reads its gradients."""

    def run(zero):
        class Dropping(torch.optim.SGD):
            def step(self, closure=None):
                if zero:
                    trainer.optimizer.zero_grad(set_to_none)
                    trainer.model.zero_grad(set_to_none)
                return super().step(closure)

        def make(model):
            return Dropping(model.parameters(), lr=0.1, momentum=0.9)

        with opened(devices, make_optimizer=make) as (trainer, _):
            for batch in numbered(4):
                trainer.step(*batch)
            return trainer.fingerprint()

    assert run(zero=True) == run(zero=False)


@on_devices
def test_the_gradient_left_after_waitall_is_the_mean_gradient(devices):
    def gradients(max_in_flight):
        with opened(devices, max_in_flight=max_in_flight) as (trainer, _):
            for batch in numbered(3):
                trainer.step(*batch)
            trainer.waitall()
            return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}

    assert_same_bits(gradients(2), gradients(1))


# Optimizers


# Each optimizer on a device that shares memory, or on one that does not.
@pytest.mark.parametrize(
    ("cls", "devices"), [(cls, DEVICES[1 + number % 2]) for number, cls in enumerate(OPTIMIZERS)]
)
def test_every_torch_optimizer_with_a_step_in_flight(cls, devices):
    def run(devices, max_in_flight):
        settings = SETTINGS.get(cls, {})
        with opened(
            devices,
            model=lambda: model_for(cls),
            make_optimizer=lambda model: cls(model.parameters(), **settings),
            max_in_flight=max_in_flight,
        ) as (trainer, _):
            losses = [trainer.step(*batch) for batch in numbered(4)]
            trainer.waitall()
            return whole_state(trainer.model, trainer.optimizer), [*map(float, losses)]

    state, losses = run(devices, 2)
    expected, expected_losses = run(1, 1)
    assert_same_bits(state, expected)
    assert losses == expected_losses


# The proxy alone


def alone(**settings):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, **settings)
    return parameter, optimizer, OptimizerProxy(optimizer)


def test_a_change_reaches_the_step_that_was_recorded_with_it():
    parameter, optimizer, proxy = alone()
    first = proxy.record()
    optimizer.param_groups[0]["lr"] = 0.25
    second = proxy.record()
    assert first == []
    assert second == [(0, "lr", 0.25)]
    assert proxy.record() == []
    gradients = {parameter: torch.ones(2)}
    proxy.step(first, gradients)
    assert parameter.tolist() == [0.5, 0.5]
    proxy.step(second, gradients)
    assert parameter.tolist() == [0.25, 0.25]


def test_the_proxy_uses_the_gradients_it_is_given_and_not_the_users():
    parameter, _, proxy = alone()
    parameter.grad = torch.full((2,), 7.0)
    proxy.step([], {parameter: torch.ones(2)})
    assert parameter.tolist() == [0.5, 0.5]
    assert parameter.grad.tolist() == [7, 7]


def test_the_state_is_the_users_under_the_users_parameters():
    parameter, optimizer, proxy = alone(momentum=0.9)
    proxy.step([], {parameter: torch.ones(2)})
    assert [*optimizer.state] == [parameter]
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1, 1]
    assert proxy.fits


@pytest.mark.parametrize(
    "change",
    [
        lambda parameter, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda parameter, optimizer: optimizer.add_param_group({"params": nn.Linear(1, 1).weight}),
        lambda parameter, optimizer: setattr(parameter, "data", torch.zeros(2)),
        lambda parameter, optimizer: optimizer.param_groups[0]["params"].clear(),
    ],
)
def test_a_proxy_that_no_longer_fits_is_renewed(change):
    parameter, optimizer, proxy = alone()
    assert proxy.fits
    change(parameter, optimizer)
    assert not proxy.fits
    proxy.renew()
    assert proxy.fits


def test_values_of_any_kind_in_the_groups_are_compared():
    _, optimizer, proxy = alone()
    group = optimizer.param_groups[0]
    group["betas"] = (torch.tensor([0.9, 0.8]), 0.5)
    assert len(proxy.record()) == 1
    assert proxy.record() == []
    group["betas"][0][1] = 0.7
    assert len(proxy.record()) == 1
    group["betas"] = (torch.tensor([0.9, 0.7], dtype=torch.float64), 0.5)
    assert len(proxy.record()) == 1
    assert proxy.record() == []


# Parameters elsewhere


@pytest.mark.parametrize("hold", OWN_LISTS.values(), ids=OWN_LISTS)
def test_an_optimizer_with_parameters_of_its_own_is_refused_with_steps_in_flight(hold):
    model = build("convolution")
    optimizer = OwnList(model.parameters(), hold)
    with pytest.raises(ContractError, match=r"OwnList\.mine holds parameters outside of"):
        open_trainer(model, optimizer=optimizer, devices=1, max_in_flight=2)


@pytest.mark.parametrize("hold", OWN_LISTS.values(), ids=OWN_LISTS)
def test_one_step_at_a_time_it_has_the_bits_of_a_plain_loop(hold):
    model, batches = build("convolution"), make_batches((24, 17))
    make = functools.partial(OwnList, hold=hold)
    plain, _ = reference_training(model, make, batches, shards=8)
    optimizer = make(model.parameters())
    with open_trainer(model, optimizer=optimizer) as trainer:
        for batch in batches:
            trainer.step(*batch)
    assert_same_bits(whole_state(model, optimizer), plain)
