"""Forward-mode AD in an objective: the bits of a plain loop on any devices, or a refusal by name.

torch has one level of forward-mode AD for the process, so two threads must not be inside at once.
"""

import functools

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import evenstep
from evenstep.errors import ContractError
from reference import assert_same_bits, reference_step, whole_state
from trainers import open_trainer

# torch's own code for it uses it
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

STEPS = 10  # of 8 shards: without turns, two threads meet in the first or second one
X, Y = torch.randn(32, 6), torch.randn(32, 1)


def squared(value, tangent, y):
    return ((value - y) ** 2 + tangent**2).sum(), len(y)


def by_jvp(model, X, y):
    return squared(*torch.func.jvp(model, (X,), (torch.ones_like(X),)), y)


def by_level(model, X, y):
    with forward_ad.dual_level():
        dual = model(forward_ad.make_dual(X, torch.ones_like(X)))
        value, tangent = forward_ad.unpack_dual(dual)
    return squared(value, tangent, y)


def by_hessian(model, X, y):
    hessian = torch.func.vmap(torch.func.hessian(lambda x: model(x).squeeze()))(X)
    return ((model(X) - y) ** 2).sum() + (hessian**2).sum(), len(y)


def by_jvp_of_jvp(model, X, y):
    def slope(x):
        return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]

    return squared(*torch.func.jvp(slope, (X,), (torch.ones_like(X),)), y)


def built():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def opened(objective, **options):
    model, optimizer = built()
    return open_trainer(model, objective=objective, optimizer=optimizer, **options)


def trained(objective, **layout):
    with opened(objective, **layout) as trainer:
        for _ in range(STEPS):
            trainer.step(X, Y)
    return whole_state(trainer.model, trainer.optimizer)


LAYOUTS = [
    {"devices": 1},
    {"devices": 2},
    {"devices": ["cpu:0", "cpu:1:own", "cpu:2"]},
    {"devices": 2, "max_in_flight": 2},
    {"devices": 2, "side_by_side": True},
]


@functools.cache
def expected(objective):
    model, optimizer = built()
    for step in range(STEPS):
        reference_step(model, optimizer, X, Y, objective=objective, shards=8, step=step)
    return whole_state(model, optimizer)


# Every objective on two devices, and `by_jvp` in every layout.
@pytest.mark.parametrize(
    ("objective", "layout"),
    [
        *[(objective, LAYOUTS[1]) for objective in (by_level, by_hessian, by_jvp_of_jvp)],
        *[(by_jvp, layout) for layout in LAYOUTS],
    ],
)
@pytest.mark.thinned(2)
def test_every_layout_has_the_bits_of_a_plain_loop(objective, layout):
    assert_same_bits(trained(objective, **layout), expected(objective))


def test_the_users_own_thread_may_use_it_while_steps_are_in_flight():
    with opened(by_jvp, max_in_flight=2) as trainer:
        for _ in range(STEPS):
            trainer.step(X, Y)
            by_jvp(built()[0], X, Y)
    assert_same_bits(whole_state(trainer.model, trainer.optimizer), expected(by_jvp))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_inside_a_level_is_refused_by_name(devices):
    with opened(by_level, devices=devices) as trainer:
        with pytest.raises(ContractError, match="forward-mode AD"), forward_ad.dual_level():
            trainer.step(X, Y)
        trainer.step(X, Y)
    with forward_ad.dual_level():  # opened inside
        trainer = opened(by_level, devices=devices)
        with trainer, pytest.raises(ContractError, match="forward-mode AD"):
            trainer.step(X, Y)
    assert trained(by_level, devices=2)  # nobody is left inside


def test_waiting_for_a_step_in_flight_inside_a_level_is_refused_by_name():
    with opened(by_level, max_in_flight=2) as trainer:
        trainer.step(X, Y)
        loss = trainer.step(X, Y)
        with pytest.raises(ContractError, match="forward-mode AD"), forward_ad.dual_level():
            float(loss)
        float(loss)


def gathers_inside(model, X, y):
    with forward_ad.dual_level():
        return (evenstep.all_gather(model(X)) ** 2).mean()


# Shards that wait for each other inside, and stages.
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (gathers_inside, {"devices": 1, "side_by_side": True}),
        (gathers_inside, {"devices": 2, "side_by_side": True}),
        (by_level, {"divide": evenstep.Stages({"0": 0, "2": 1})}),
    ],
    ids=["one device", "two devices", "stages"],
)
def test_what_must_leave_a_level_to_wait_is_refused_by_name(objective, options):
    with (
        opened(objective, **options) as trainer,
        pytest.raises(ContractError, match="forward-mode AD"),
    ):
        trainer.step(X, Y)


def test_torch_is_as_it_was_afterwards():
    before = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    trained(by_jvp, devices=2)
    assert (forward_ad.enter_dual_level, forward_ad.exit_dual_level) == before
