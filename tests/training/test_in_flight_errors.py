"""A step that fails with another one in flight: neither is taken, and training goes on exactly."""

import functools
import signal
import threading

import pytest
import torch

from evenstep.data import Cursor
from evenstep.errors import BatchError, InputError, NonFiniteLossError
from in_flight import DEVICES, HeldCopies, numbered, opened, outcome
from layouts import own
from patience import main_thread_is_in, only_one_interrupt, wait, wait_until
from reference import assert_same_bits

on_devices = pytest.mark.parametrize("devices", DEVICES, ids=str)
BATCHES = numbered(6)


@functools.cache
def undisturbed(steps=5, **options):
    with opened(1, max_in_flight=1, **options) as (trainer, _):
        for batch in BATCHES[:steps]:
            trainer.step(*batch)
    return outcome(trainer)


def float_of(trainer, handle):
    float(handle)


def next_step(trainer, handle):
    trainer.step(*BATCHES[4])


def waitall(trainer, handle):
    trainer.waitall()


def fingerprint(trainer, handle):
    trainer.fingerprint()


somewhere = pytest.mark.parametrize("wait_somewhere", [float_of, next_step, waitall, fingerprint])


def bang(output):
    raise RuntimeError("bang")


def give_nan(output):
    return output * torch.nan


def assert_not_taken(trainer, before, handles, error):
    """Steps 2 and 3 have failed with `error`."""
    assert_same_bits(outcome(trainer), before)
    assert trainer.steps_done == 2
    assert trainer.cursor == Cursor(0, 2)
    for handle in handles:
        for _ in range(2):
            with pytest.raises(error):
                float(handle)


def go_on(trainer, gates, before, handles, error):
    """Step 2 has failed with step 3 in flight: look at what is left, and take the steps again."""
    assert_not_taken(trainer, before, handles, error)
    gates.then.clear()
    for batch in BATCHES[2:5]:
        trainer.step(*batch)
    trainer.waitall()
    assert_same_bits(outcome(trainer), undisturbed())


def two_steps(trainer):
    for batch in BATCHES[:2]:
        trainer.step(*batch)
    trainer.waitall()
    return outcome(trainer)


def submit_two(trainer, gates):
    """Take two steps, and submit two more, held; return the state and the handles of these."""
    before = two_steps(trainer)
    gates.hold(2)
    return before, [trainer.step(*batch) for batch in BATCHES[2:4]]


@pytest.mark.parametrize(
    ("devices", "then", "error"),
    [
        (1, bang, RuntimeError),
        (2, give_nan, NonFiniteLossError),
        (own(2), bang, RuntimeError),
        (own(2), give_nan, NonFiniteLossError),
    ],
)
@somewhere
@pytest.mark.thinned(2)
def test_a_shard_that_fails_with_the_next_step_in_flight(devices, wait_somewhere, then, error):
    with opened(devices) as (trainer, gates):
        gates.then[2] = then
        before, handles = submit_two(trainer, gates)
        wait(gates.at_work[2])
        gates.release(2)
        with pytest.raises(error, match=r"bang|step 2 \(epoch 0, batch 2\)"):
            wait_somewhere(trainer, handles[1])
        go_on(trainer, gates, before, handles, error)


@on_devices
@somewhere
def test_the_later_of_two_steps_fails(devices, wait_somewhere):
    with opened(devices) as (trainer, gates):
        gates.then[3] = bang
        _, (taken, failed) = submit_two(trainer, gates)
        gates.release(2)
        assert float(taken) > 0
        with pytest.raises(RuntimeError, match="bang"):  # noqa: PT012
            wait_somewhere(trainer, failed)
            trainer.waitall()  # the next step need not wait for it
        assert trainer.steps_done == 3
        assert_same_bits(outcome(trainer), undisturbed(3))
        gates.then.clear()
        for batch in BATCHES[3:5]:
            trainer.step(*batch)
        trainer.waitall()
        assert_same_bits(outcome(trainer), undisturbed())


@on_devices
def test_before_update_that_has_failed_leaves_no_gradients_of_the_users_own(devices):
    """The next step tells the hook's error, and not that gradients were set in flight."""
    calls, has_failed = [], threading.Event()

    def before_update(module):
        calls.append(module)
        if len(calls) == 3:
            has_failed.set()
            raise KeyError("the hook's")

    with opened(devices, before_update=before_update) as (trainer, _):
        two_steps(trainer)
        trainer.step(*BATCHES[2])
        wait(has_failed)
        with trainer._update._showing:  # as soon as the hook's caller has let go
            pass
        with pytest.raises(KeyError, match="the hook's"):  # noqa: PT012
            trainer.step(*BATCHES[3])
            trainer.waitall()


@pytest.mark.parametrize(
    ("devices", "draws"), [(1, True), (2, False), (own(2), False), (own(2), True)]
)
@somewhere
def test_a_batch_written_to_right_after_step_returned(devices, wait_somewhere, draws):
    let_copy = threading.Event()
    let_copy.set()
    options = {"model": "dropout"} if draws else {}
    with opened(devices, lanes=lambda found: HeldCopies(found, let_copy), **options) as (
        trainer,
        _,
    ):
        before = two_steps(trainer)
        let_copy.clear()
        X, y, number = (tensor.clone() for tensor in BATCHES[2])
        handles = trainer.step(X, y, number), trainer.step(*BATCHES[3])
        torch.randn(3, out=X.view(-1)[:3])
        let_copy.set()
        with pytest.raises(BatchError, match="batch was written to"):
            wait_somewhere(trainer, handles[1])
        assert_not_taken(trainer, before, handles, BatchError)
        for batch in BATCHES[2:5]:
            trainer.step(*batch)
        trainer.waitall()
        assert_same_bits(outcome(trainer), undisturbed(**options))


def write_parameter(model):
    model[4].weight.detach().mul_(0.5)


def negate_past_the_counter(model):
    model[4].weight.data.neg_()


def load(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


WRITES = {
    "a parameter": write_parameter,
    "its storage": lambda model: setattr(model[4].weight, "data", model[4].weight.data * 0.5),
    "load_state_dict": load,
    "a buffer": lambda model: model[1].reset_running_stats(),
    "drawn": lambda model: model[4].weight.detach().normal_(),  # as if the step had drawn
    "past the counter": negate_past_the_counter,
    "a buffer past the counter": lambda model: model[1].running_var.data.mul_(2),
}


@on_devices
@pytest.mark.parametrize(("number", "name"), [*enumerate(WRITES)])
@pytest.mark.thinned(2)
def test_parameters_or_buffers_written_to_in_flight(devices, number, name):
    """With a second step in flight, or without one."""
    second = (DEVICES.index(devices) + number) % 2
    with opened(devices) as (trainer, gates):
        before = two_steps(trainer)
        gates.hold(2)
        handles = [trainer.step(*BATCHES[2])]
        if second:
            handles.append(trainer.step(*BATCHES[3]))
        wait(gates.at_work[2])
        WRITES[name](trainer.model)
        gates.release(2)
        with pytest.raises(InputError, match=r"call trainer\.waitall\(\) before you change"):
            float(handles[0])
        with torch.no_grad():  # what the user wrote is the user's to undo
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(before[f"parameter/{name}"])
        go_on(trainer, gates, before, handles, InputError)


@on_devices
def test_parameters_written_between_the_end_of_a_step_and_the_next_one_in_flight(devices):
    """Step 2 is over, which the user can't know, when they write; step 3 is not."""
    with opened(devices) as (trainer, gates):
        two_steps(trainer)
        first = trainer.step(*BATCHES[2])
        gates.hold(3)
        second = trainer.step(*BATCHES[3])
        wait(gates.at_work[3])
        write_parameter(trainer.model)
        gates.release(3)
        assert float(first) > 0
        with pytest.raises(InputError, match=r"call trainer\.waitall"):
            float(second)
        assert trainer.steps_done == 3
        trainer.step(*BATCHES[3])


@on_devices
def test_a_write_past_the_version_counter_is_seen_after_many_steps_too(devices):
    with opened(devices) as (trainer, gates):
        *earlier, last = numbered(19)
        for batch in earlier:
            trainer.step(*batch)
        gates.hold(18)
        handle = trainer.step(*last)
        wait(gates.at_work[18])
        negate_past_the_counter(trainer.model)
        gates.release(18)
        with pytest.raises(InputError, match=r"call trainer\.waitall"):
            float(handle)
        assert trainer.steps_done == 18


@on_devices
def test_counters_in_the_groups_of_steps_taken_survive_a_failure(devices):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            self.param_groups[0]["lr"] = 0.1 / self.param_groups[0]["k"]
            return super().step(closure)

    def make_optimizer(model):
        return Counting(model.parameters(), lr=0.1)

    with opened(devices, make_optimizer=make_optimizer) as (trainer, gates):
        for batch in BATCHES[:2]:
            trainer.step(*batch)
        gates.then[2] = bang
        trainer.step(*BATCHES[2])
        with pytest.raises(RuntimeError, match="bang"):
            trainer.waitall()
        assert trainer.optimizer.param_groups[0]["k"] == 2
        gates.then.clear()
        for batch in BATCHES[2:5]:
            trainer.step(*batch)
        trainer.waitall()
        assert trainer.optimizer.param_groups[0]["k"] == 5
        assert_same_bits(outcome(trainer), undisturbed(make_optimizer=make_optimizer))


def is_waiting():
    """Whether the main thread waits for a lane."""
    return main_thread_is_in("_wait_for")


@on_devices
@pytest.mark.parametrize("wait_somewhere", [float_of, next_step, waitall])
@pytest.mark.thinned(2)
def test_interrupted_while_waiting(devices, wait_somewhere, request):
    """Ctrl-C while somebody waits: neither step is taken, and nothing is left at work."""
    noticed = only_one_interrupt(request)

    with opened(devices) as (trainer, gates):
        before = two_steps(trainer)

        def interrupt(output):
            attempt = trainer._pipeline.steps[0].attempt

            def sent():
                if (
                    not noticed and is_waiting()
                ):  # a signal that comes just before a thread falls asleep is missed
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                return attempt.ending.dropped

            wait_until(sent)
            return output

        gates.then[2] = interrupt
        handles = trainer.step(*BATCHES[2]), trainer.step(*BATCHES[3])
        with pytest.raises(KeyboardInterrupt):
            wait_somewhere(trainer, handles[1])
        go_on(trainer, gates, before, handles, KeyboardInterrupt)
