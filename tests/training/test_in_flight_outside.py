"""Numbers outside of the model that code in a step in flight reads, and hooks of its optimizer."""

import concurrent.futures
import functools
import threading
import time
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import InputError
from grouping import grouped
from layouts import own
from patience import wait
from reference import assert_same_bits, whole_state
from zoo import make_batches

BETA = 0.5
SETTINGS = {"beta": 0.5}
DEVICES = [1, 2, own(2)]
on_devices = pytest.mark.parametrize("devices", DEVICES, ids=str)
BATCHES = make_batches((24,) * 5)


class Gate:
    """Holds the shards of steps until it is opened, so that a change is there before they read."""

    def __init__(self):
        self._open = threading.Event()

    def passed(self, model=None):
        wait(self._open)
        return model

    def open(self):
        self._open.set()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 5))


def scaled(model, X, y, beta):
    return F.cross_entropy(model(X) * beta, y)


class Annealed(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.gate, self.beta, self.calls = gate, 0.5, 0

    def forward(self, output, y):
        self.gate.passed()
        self.calls += 1  # a note of its own
        return F.cross_entropy(output * self.beta, y)


def in_a_closure(gate):
    beta = 0.5

    def change():
        nonlocal beta
        beta = 0.1

    return lambda model, X, y: scaled(gate.passed(model), X, y, beta), change


def halve_the_global():
    globals().update(BETA=BETA / 2)


def in_a_global(gate):
    return lambda model, X, y: scaled(gate.passed(model), X, y, BETA), halve_the_global


def in_a_function_that_it_calls(gate):
    def inner():
        return BETA

    return lambda model, X, y: scaled(gate.passed(model), X, y, inner()), halve_the_global


def in_a_dict(gate):
    def change():
        SETTINGS["beta"] /= 2

    return lambda model, X, y: scaled(gate.passed(model), X, y, SETTINGS["beta"]), change


def in_a_namespace(gate):
    args = types.SimpleNamespace(beta=0.5)
    change = functools.partial(setattr, args, "beta", 0.1)
    return lambda model, X, y: scaled(gate.passed(model), X, y, args.beta), change


def in_a_tensor(gate):
    beta = torch.tensor(0.5)
    change = functools.partial(beta.fill_, 0.1)
    return lambda model, X, y: scaled(gate.passed(model), X, y, beta), change


def in_the_loss(gate):
    loss = Annealed(gate)
    return {"loss": loss}, functools.partial(setattr, loss, "beta", 0.1)


def in_torchs_loss(gate):
    loss = nn.CrossEntropyLoss()
    change = functools.partial(setattr, loss, "label_smoothing", 0.3)
    return lambda model, X, y: loss(gate.passed(model)(X), y), change


def in_an_object(gate):
    class Vae:
        beta = 0.5

        def loss(self, model, X, y):
            return scaled(gate.passed(model), X, y, self.beta)

    vae = Vae()
    vae.beta = 0.5
    return vae.loss, functools.partial(setattr, vae, "beta", 0.1)


def in_before_update(gate):
    most = 0.5

    def before_update(model):
        gate.passed()
        nn.utils.clip_grad_norm_(model.parameters(), most)

    def change():
        nonlocal most
        most = 0.1

    return {"loss": nn.CrossEntropyLoss(), "before_update": before_update}, change


PLACES = [
    (in_a_closure, "beta"),
    (in_a_global, "BETA"),
    (in_a_function_that_it_calls, "BETA"),
    (in_a_dict, "SETTINGS"),
    (in_a_namespace, "args"),
    (in_a_tensor, "beta"),
    (in_the_loss, "beta"),
    (in_torchs_loss, "label_smoothing"),
    (in_an_object, "beta"),
    (in_before_update, "most"),
]


def opened(options, devices, max_in_flight=2, **others):
    """Return a trainer; `options` may be an objective alone."""
    options = options if isinstance(options, dict) else {"objective": options}
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evenstep.Trainer(
        model,
        optimizer,
        **grouped(devices=devices, max_in_flight=max_in_flight, check="off", **options, **others),
    )


@on_devices
@pytest.mark.parametrize("number", range(len(PLACES)))
def test_a_number_changed_with_a_step_in_flight_is_refused(devices, number):
    """The step would read the new number, or the old one, as its timing would have it."""
    place, name = PLACES[number]
    then = ["step", "waitall", "item"][(number + DEVICES.index(devices)) % 3]
    gate = Gate()
    options, change = place(gate)
    with opened(options, devices) as trainer:
        loss = changed_in_flight(trainer, change, gate)
        call = {"step": lambda: trainer.step(*BATCHES[1]), "waitall": trainer.waitall}
        with pytest.raises(InputError, match=rf"\b{name}\b(?s:.*)waitall"):
            call.get(then, loss.item)()


@on_devices
def test_a_loss_that_is_there_already_is_refused_too(devices):
    """Whether the step had ended when its loss was read was a matter of time."""
    gate = Gate()
    options, change = in_the_loss(gate)
    with opened(options, devices) as trainer:
        loss = changed_in_flight(trainer, change, gate)
        let_it_end(loss)
        with pytest.raises(InputError, match=r"\bbeta\b(?s:.*)waitall"):
            loss.item()


@on_devices
def test_what_was_read_before_a_loss_that_was_there_may_change(devices):
    """A step whose loss was read counted as in flight if it had ended before that."""
    gate = Gate()
    gate.open()
    options, change = in_the_loss(gate)
    with opened(options, devices) as trainer:
        loss = trainer.step(*BATCHES[0])
        let_it_end(loss)
        loss.item()
        change()
        trainer.step(*BATCHES[1])


@on_devices
def test_another_thread_only_reads_a_loss_that_is_there(devices):
    gate = Gate()
    gate.open()
    with opened(in_the_loss(gate)[0], devices) as trainer:
        loss = trainer.step(*BATCHES[0])
        let_it_end(loss)
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            assert other.submit(loss.item).result() == loss._step.loss
        assert trainer._pipeline.steps
        assert loss.item() == loss._step.loss
        assert not trainer._pipeline.steps


def changed_in_flight(trainer, change, gate):
    """Take a step, and change something before it can read it; return its loss."""
    try:
        loss = trainer.step(*BATCHES[0])
        change()
    finally:
        gate.open()
    return loss


def let_it_end(loss):
    """Wait until a step has ended, without telling the trainer."""
    patience_s = time.monotonic() + 60
    while not loss._step.finished and time.monotonic() < patience_s:
        time.sleep(0.001)
    assert loss._step.finished


@on_devices
@pytest.mark.parametrize(("place", "name"), PLACES)
def test_between_two_steps_it_may_change(devices, place, name):
    gate = Gate()
    gate.open()
    options, change = place(gate)
    with opened(options, devices) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
            trainer.waitall()
            change()


@on_devices
def test_what_the_message_proposes_gives_plain_torchs_result(devices):
    """A number in the batch, or in an attribute of the model, is that of its own step."""

    def given(model, X, y, beta):
        return scaled(model, X, y, beta)

    def held(model, X, y):
        return scaled(model, X, y, model.beta)

    betas, states = [0.5, 0.4, 0.3, 0.2, 0.1], []
    for objective, max_in_flight in ((given, 2), (held, 2)):
        with opened(objective, devices, max_in_flight, shards=1) as trainer:
            for beta, (X, y) in zip(betas, BATCHES, strict=True):
                trainer.model.beta = beta
                trainer.step(X, y, *([beta] if objective is given else []))
            trainer.waitall()
            states.append(whole_state(trainer.model, trainer.optimizer))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for beta, (X, y) in zip(betas, BATCHES, strict=True):
        optimizer.zero_grad()
        scaled(model, X, y, beta).backward()
        optimizer.step()
    for state in states:
        assert_same_bits(state, whole_state(model, optimizer))


@on_devices
def test_notes_that_the_code_itself_takes_are_no_change(devices):
    """Counts and lists that shards or hooks write, while the user's thread reads them."""
    calls, seen, stats, total = 0, [], {"calls": 0}, [0.0]

    def objective(model, X, y):
        nonlocal calls
        calls += 1
        seen.append(len(X))
        stats["calls"] += 1
        return F.cross_entropy(model(X), y)

    def after_update(model):
        total[0] += 1.0
        stats.update(done=total[0])

    with opened(objective, devices, after_update=after_update) as trainer:
        loss = None
        for X, y in BATCHES:
            loss = float(trainer.step(X, y)) if loss is None else trainer.step(X, y)
        trainer.waitall()
    assert len(seen) == calls
    assert stats["done"] == len(BATCHES)


class Custom(torch.optim.Optimizer):
    """Reads its own settings, which a loop may change."""

    def __init__(self, parameters, settings):
        super().__init__(parameters, {})
        self.settings = settings

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad, alpha=self.settings["rate"])
        self.settings["steps"] += 1


@on_devices
def test_a_dict_of_the_optimizer_is_that_of_its_own_step(devices):
    states = []
    for max_in_flight in (1, 2):
        gate, model, settings = Gate(), net(), {"rate": 0.1, "steps": 0}
        optimizer = Custom(model.parameters(), settings)

        def objective(model, X, y, gate=gate):
            gate.passed()
            return F.cross_entropy(model(X), y)

        options = {"devices": devices, "max_in_flight": max_in_flight, "check": "off"}
        with evenstep.Trainer(
            model, optimizer, **grouped(objective=objective, **options)
        ) as trainer:
            for number, (X, y) in enumerate(BATCHES):
                if max_in_flight == 1:
                    gate.open()
                settings["rate"] = 0.1 / (number + 1)
                trainer.step(X, y)
                if number == 1:
                    gate.open()
            trainer.waitall()
            assert optimizer.settings is settings
            assert settings["steps"] == len(BATCHES)
        states.append(whole_state(model, optimizer))
    assert_same_bits(*states)


# Hooks of the optimizer's step


@on_devices
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_hook_on_the_optimizers_step_is_refused_with_steps_in_flight(devices, when, kind):
    """It would see no gradients in the model's parameters: clipping there would do nothing."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clip(*given):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    register = getattr(optimizer, f"register_step_{kind}_hook")
    if when == "before":
        register(clip)
    options = {"devices": devices, "max_in_flight": 2}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        if when == "later":
            trainer.step(*BATCHES[0])
            register(clip)
        with pytest.raises(InputError, match=rf"register_step_{kind}_hook(?s:.*)update="):
            trainer.step(*BATCHES[1])
        trainer.waitall()


@on_devices
def test_a_learning_rate_that_the_objective_reads_is_refused_if_it_changes_in_flight(devices):
    """A step is updated with its own rate, whatever its shards have read in the optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def objective(model, X, y):
        return scaled(model, X, y, 1 + optimizer.param_groups[0]["lr"])

    with evenstep.Trainer(
        model, optimizer, objective=objective, devices=devices, max_in_flight=2
    ) as trainer:
        trainer.step(*BATCHES[0])
        trainer.waitall()
        optimizer.param_groups[0]["lr"] = 0.05
        trainer.step(*BATCHES[1])
        optimizer.param_groups[0]["lr"] = 0.01
        with pytest.raises(InputError, match=r"param_groups\[0\]\['lr'\] was changed with a step"):
            trainer.step(*BATCHES[2])
