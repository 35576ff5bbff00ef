"""What the user's own code does in an update and between two steps: right, or refused by name."""

import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import evenstep
from evenstep.errors import ContractError, InputError, ModelError
from grouping import grouped
from in_flight import HeldCopies, numbered, opened
from layouts import own
from patience import wait, wait_until
from reference import assert_same_bits, bits_of, plain_training, whole_state
from trainers import LAYOUTS, open_trainer, sgd, take_steps
from zoo import Momentum, follow, make_batches

in_flight = pytest.mark.parametrize("max_in_flight", [1, 2])
BATCHES = make_batches((24, 17, 24, 24, 24))


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def lbfgs(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.LBFGS(trained, lr=0.1, max_iter=3)


# after_update


def follow_over(devices, max_in_flight, make_optimizer=sgd):
    """Return the state of a training with a momentum encoder, and that of an average outside."""
    model = Momentum()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def after_update(module):
        follow(module)
        average.update_parameters(module)

    options = {"devices": devices, "max_in_flight": max_in_flight, "after_update": after_update}
    trainer = open_trainer(model, optimizer=make_optimizer(model), **options)
    return take_steps(trainer, BATCHES), state_of(average)


@functools.cache
def followed_alone(make_optimizer=sgd):
    return follow_over(1, 1, make_optimizer)


@in_flight
@pytest.mark.parametrize("make_optimizer", [sgd, lbfgs], ids=lambda make: make.__name__)
@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
@pytest.mark.thinned(3)
def test_after_update_gives_the_same_bits_everywhere(devices, max_in_flight, make_optimizer):
    found, expected = (
        follow_over(devices, max_in_flight, make_optimizer),
        followed_alone(make_optimizer),
    )
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)
    assert found[0]["buffer/updates"] == len(BATCHES)


class Warming(nn.Module):
    """A model whose temperature a hook changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.settings = nn.Linear(36, 5), {"temperature": 1.0}
        self.head.scale = 1.0
        self.register_buffer("heat", torch.ones(()))

    def forward(self, x):
        return self.head(x.flatten(1)) * self.head.scale * self.settings["temperature"] * self.heat


def set_attribute(module):
    module.head.scale /= 2


def set_item(module):
    module.settings["temperature"] /= 2


def set_buffer(module):
    with torch.no_grad():
        module.heat /= 2


def warm(hook, write, **options):
    return take_steps(open_trainer(Warming(), **{hook: write}, **options), BATCHES)


@functools.cache
def warmed_alone(hook):
    return warm(hook, set_buffer, devices=1)


@pytest.mark.parametrize("hook", ["before_update", "after_update"])
@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
@pytest.mark.thinned(2)
def test_what_hooks_set_is_seen_by_the_next_step_or_refused(devices, hook):
    expected = warmed_alone(hook)
    for write in (set_attribute, set_item):
        state = warm(hook, write, devices=devices)
        assert torch.equal(state["parameter/head.weight"], expected["parameter/head.weight"])
        named = "head.scale of the module" if write is set_attribute else "holds of the module"
        with pytest.raises(ContractError, match=rf"{hook} has changed .*{named} .*in flight"):
            warm(hook, write, devices=devices, max_in_flight=2)
    assert_same_bits(warm(hook, set_buffer, devices=devices, max_in_flight=2), expected)


@pytest.mark.parametrize("hook", ["before_update", "after_update"])
def test_hooks_may_change_a_module_and_change_it_back(hook):
    def write(module):
        module.eval()
        module.train()

    assert_same_bits(warm(hook, write, max_in_flight=2), warm(hook, write))


def plain(model, **hooks):
    optimizer = sgd(model)
    plain_training(model, optimizer, BATCHES, **hooks)
    return whole_state(model, optimizer)


def test_after_update_is_the_plain_loop_for_one_shard():
    found = take_steps(open_trainer(Momentum(), shards=1, after_update=follow), BATCHES)
    assert_same_bits(found, plain(Momentum(), after_update=follow))


@in_flight
def test_after_update_goes_on_in_a_resumed_training(tmp_path, max_in_flight):
    options = {"after_update": follow, "max_in_flight": max_in_flight}
    first = open_trainer(Momentum(), devices=own(2), **options)
    take_steps(first, BATCHES[:2])
    first.save(tmp_path)
    model, options = Momentum(), grouped(devices=3, **options)
    again = evenstep.Trainer.load(tmp_path, model, sgd(model), nn.CrossEntropyLoss(), **options)
    assert_same_bits(take_steps(again, BATCHES[2:]), followed_alone()[0])


# Buffers that hooks write


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.register_buffer("written", torch.zeros(3))

    def forward(self, x):
        return self.head(self.norm(self.body(x.flatten(1)))) + self.written.sum()


def write(model):
    model.written = model.written + 1
    model.norm.running_mean.mul_(0.5)


def in_before_update(model, optimizer):
    return {"before_update": write}


def in_a_pre_hook(model, optimizer):
    optimizer.register_step_pre_hook(lambda *_: write(model))
    return {}


def in_a_post_hook(model, optimizer):
    optimizer.register_step_post_hook(lambda *_: write(model))
    return {}


@pytest.mark.parametrize(
    ("where", "max_in_flight"),
    [(in_before_update, 1), (in_before_update, 2), (in_a_pre_hook, 1), (in_a_post_hook, 1)],
)
def test_buffers_that_a_hook_writes_stay_written(where, max_in_flight):
    def run(devices, shards):
        model = Counted()
        optimizer = sgd(model)
        options = {**where(model, optimizer), "devices": devices, "shards": shards}
        options |= {"optimizer": optimizer, "max_in_flight": max_in_flight}
        return take_steps(open_trainer(model, **options), BATCHES)

    assert_same_bits(run(1, 1), plain(Counted(), before_update=write))
    one = run(1, 4)
    for devices in (2, own(2)):
        assert_same_bits(run(devices, 4), one)


def test_a_buffer_that_before_update_writes_stays_written_with_lbfgs():
    model, calls = Counted(), []

    def before_update(module):
        module.written += 1
        calls.append(1)

    options = {"devices": 1, "before_update": before_update}
    take_steps(open_trainer(model, optimizer=lbfgs(model), **options), BATCHES[:1])
    assert model.written.tolist() == [len(calls)] * 3


class Aliased(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(36, 5)
        self.register_buffer("view", self.body.weight.detach()[2:])

    def forward(self, x):
        return self.body(x.flatten(1))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_buffer_in_the_memory_of_a_parameter_is_refused(devices):
    with pytest.raises(ContractError, match=r"the buffer view shares memory with .* body\.weight"):
        open_trainer(Aliased(), devices=devices)


class Constants(nn.Module):
    """Constant buffers, as a shard leaves them: with NaN, and with zeros of both signs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(36, 5)
        self.register_buffer("missing", torch.tensor([0.1, torch.nan, 0.7, 1e-40]))
        self.register_buffer("zeros", torch.tensor([0.0, -0.0]))
        self.register_buffer("flips", torch.tensor([0.0, -0.0]))

    def forward(self, x):
        self.flips = -self.flips
        return self.head(x.flatten(1))


@pytest.mark.parametrize("devices", [1, 2, own(2)], ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_constant_buffer_keeps_its_bits_and_a_zero_its_sign(devices, shards):
    model, before = Constants(), Constants()
    options = {"devices": devices, "shards": shards, "buffers": {"flips": "mean"}}
    take_steps(open_trainer(model, **options), BATCHES[:3])
    assert bits_of(model.missing) == bits_of(before.missing)
    assert bits_of(model.zeros) == bits_of(before.zeros)
    if shards == 1:  # three steps, as in a plain loop
        assert bits_of(model.flips) == bits_of(-before.flips)


# The optimizer


@pytest.mark.parametrize(
    ("max_in_flight", "make_optimizer", "scheduled"),
    [(1, sgd, True), (2, sgd, False), (2, sgd, True), (1, lbfgs, False), (2, lbfgs, True)],
)
def test_a_left_over_step_of_the_optimizer_is_refused(max_in_flight, make_optimizer, scheduled):
    model = Momentum()
    optimizer = make_optimizer(model)
    if scheduled:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with open_trainer(model, optimizer=optimizer, max_in_flight=max_in_flight) as trainer:
        optimizer.zero_grad()
        trainer.step(*BATCHES[0])
        before = trainer.fingerprint()
        with pytest.raises(ContractError, match=r"remove loss\.backward\(\) and optimizer\.step"):
            optimizer.step(lambda: 0.0)
        assert trainer.fingerprint() == before
        if scheduled:
            scheduler.step()
        trainer.step(*BATCHES[1])
        trainer.waitall()
    optimizer.step(lambda: 0.0)  # the trainer is closed


class Scaled(torch.optim.SGD):
    """An optimizer whose attributes say how far it goes, and count."""

    scale, calls = 1.0, 0

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.scale, self.calls, self.sizes = 1.0, 0, []

    def step(self, closure=None):
        self.calls += 1
        self.sizes = [*self.sizes, self.scale]
        self.param_groups[0]["lr"] = 0.1 * self.scale
        return super().step(closure)


def test_attributes_of_a_custom_optimizer_are_those_in_force_when_a_step_was_submitted():
    def run(devices, max_in_flight):
        with opened(
            devices,
            model=Counted,
            make_optimizer=lambda model: Scaled(model.parameters()),
            max_in_flight=max_in_flight,
        ) as (trainer, _):
            for number, batch in enumerate(numbered(5)):
                trainer.optimizer.scale = 1 / (number + 1)
                trainer.step(*batch)
            fingerprint = trainer.fingerprint()
            return fingerprint, trainer.optimizer.calls, trainer.optimizer.sizes

    one = run(1, 1)
    assert one[1:] == (5, [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    for devices in (1, 2, own(2)):
        assert run(devices, 2) == one


def test_a_step_patched_on_the_optimizer_is_called_or_refused():
    def patched(optimizer, calls):
        original = optimizer.step
        optimizer.step = lambda closure=None: (calls.append(1), original(closure))[1]

    model, calls = Counted(), []
    with open_trainer(model) as trainer:
        patched(trainer.optimizer, calls)
        trainer.step(*BATCHES[0])
        assert len(calls) == 1
    with pytest.raises(ContractError, match=r"SGD\.step was replaced on the optimizer itself"):
        open_trainer(model, optimizer=trainer.optimizer, devices=1, max_in_flight=2)
    with open_trainer(Counted(), max_in_flight=2) as trainer:
        trainer.step(*BATCHES[0])
        patched(trainer.optimizer, calls)
        with pytest.raises(ContractError, match=r"SGD\.step was replaced"):
            trainer.step(*BATCHES[1])


# Parameters written past the version counters


def clamp(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


@in_flight
@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
@pytest.mark.thinned(2)
def test_data_written_between_steps_reaches_every_memory(devices, max_in_flight):
    def run(devices, max_in_flight):
        model, sums = Counted(), []
        with open_trainer(model, devices=devices, max_in_flight=max_in_flight) as trainer:
            for X, y in BATCHES:
                float(trainer.step(X, y))  # nothing is in flight now
                clamp(model)
                sums.append(trainer.evaluate([(X, y)], {"sum": lambda o, y: (o.sum(), 1)})["sum"])
                model.head.weight.data.mul_(0.5)
            return trainer.fingerprint(), sums

    assert run(devices, max_in_flight) == run(1, 1)


@pytest.mark.parametrize("devices", [1, 2, own(2)], ids=str)
@pytest.mark.parametrize("earlier", [2, 20])
def test_data_written_with_steps_in_flight_is_refused(devices, earlier):
    """In the first steps at once; later where every 17th is looked at."""
    with opened(devices) as (trainer, gates):
        batches = numbered(earlier + 17)

        def write_with_each_step_in_flight():
            for number in range(earlier, earlier + (1 if earlier == 2 else 17)):
                gates.hold(number)
                handle = trainer.step(*batches[number])
                wait(gates.at_work[number])
                clamp(trainer.model)
                gates.release(number)
                float(handle)

        for batch in batches[:earlier]:
            trainer.step(*batch)
        with pytest.raises(InputError, match=r"parameters or buffers were written to"):
            write_with_each_step_in_flight()
        for batch in batches[earlier:]:
            trainer.step(*batch)
        copies = [replica.parameters for replica in trainer._replicas.all]
        trainer.waitall()
        for parameters in copies:
            for one, other in zip(parameters, trainer.model.parameters(), strict=True):
                assert torch.equal(one, other)


# Parameters that the optimizer does not hold


def replace(model):
    model.head = nn.Linear(8, 5)


@in_flight
@pytest.mark.parametrize("devices", [1, 2])
def test_a_new_layer_that_the_optimizer_does_not_hold_is_refused(devices, max_in_flight):
    model = Counted()
    options = {"devices": devices, "max_in_flight": max_in_flight}
    with open_trainer(model, **options) as trainer:
        trainer.step(*BATCHES[0])
        replace(model)
        for _ in range(2):
            with pytest.raises(
                ContractError, match=r"not be trained: head\.weight, head\.bias\. Add"
            ):
                trainer.step(*BATCHES[1])
        assert trainer.steps_done == 1
        trainer.optimizer.add_param_group({"params": model.head.parameters()})
        before = model.head.weight.detach().clone()
        trainer.step(*BATCHES[1])
        assert trainer.fingerprint()
        assert not torch.equal(model.head.weight, before)
        model.extra = nn.Linear(2, 2).requires_grad_(False)  # nothing would train it anyway
        trainer.step(*BATCHES[2])


def test_partial_fine_tuning_is_not_refused():
    model = Counted()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=2) as trainer:
        trainer.step(*BATCHES[0])
        model.body.requires_grad_(False)
        model.norm.momentum = 0.2
        trainer.step(*BATCHES[1])
        model.head.register_forward_hook(lambda module, inputs, output: output * 0.5)
        trainer.step(*BATCHES[2])


def test_a_checkpoint_of_an_optimizer_that_holds_a_replaced_layer_is_refused(tmp_path):
    model = Counted()
    with open_trainer(model) as trainer:
        replace(model)
        trainer.optimizer.add_param_group({"params": model.head.parameters()})
        trainer.step(*BATCHES[1])
        with pytest.raises(ModelError, match=r"holds 2 of 8 parameters that are not the model's"):
            trainer.save(tmp_path)


# The optimizer's state, and the batch


def write_state(optimizer):
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()


def set_state(optimizer):
    for state in optimizer.state.values():
        state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])


@pytest.mark.parametrize("change", [write_state, set_state])
def test_state_of_the_optimizer_written_with_a_step_in_flight_is_refused(change):
    with opened(2) as (trainer, gates):
        batches = numbered(4)
        for batch in batches[:2]:
            trainer.step(*batch)
        trainer.waitall()
        change(trainer.optimizer)  # nothing is in flight
        gates.hold(2)
        handle = trainer.step(*batches[2])
        wait(gates.at_work[2])
        change(trainer.optimizer)
        gates.release(2)
        with pytest.raises(InputError, match="the optimizer's state was written to while a step"):
            float(handle)
        trainer.step(*batches[3])


def test_a_numpy_buffer_behind_the_batch_may_be_reused():
    let_copy, lanes = threading.Event(), []
    let_copy.set()
    batches = [(X.numpy(), y) for X, y in make_batches((16,) * 3)]

    def make_lanes(devices):
        lanes.append(HeldCopies(devices, let_copy))
        return lanes[0]

    def hold_copies_after(steps):
        """Hold the copies of further steps; a step may wait for those of earlier ones."""
        wait_until(lambda: len(lanes[0].copied) == steps * len(lanes[0].devices))
        let_copy.clear()

    def run(max_in_flight, **options):
        buffer = np.empty((16, 1, 6, 6), dtype=np.float32)
        with open_trainer(Counted(), max_in_flight=max_in_flight, **options) as trainer:
            for number, (X, y) in enumerate(batches):
                buffer[:] = X
                if number and max_in_flight > 1:
                    hold_copies_after(number)
                trainer.step(torch.from_numpy(buffer), y)
                buffer[:] = 7
                let_copy.set()
            return trainer.fingerprint()

    assert run(2, lanes=make_lanes) == run(1)
