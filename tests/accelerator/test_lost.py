"""Accelerators that fail, stand still or are slow while they train."""

import _thread
import math
import signal
import threading

import pytest
import torch
from torch import nn

import emu
import evenstep
from evenstep.errors import DeviceLostError
from patience import wait_until
from reference import assert_same_bits, whole_state

SIZES = (16, 19, 16, 16, 16, 16)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batch_of(number):
    given = torch.Generator().manual_seed(number)
    X = torch.randn(SIZES[number], 5, generator=given)
    return X, torch.arange(SIZES[number]) % 3


TWO = ["emu:0", "emu:1"]


def opened(devices=TWO, **options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"devices": devices, "shards": 4, **options}
    if "objective" not in options:
        options["loss"] = nn.CrossEntropyLoss()
    return evenstep.Trainer(model, optimizer, **options)


def state_here(trainer):
    return emu.on_the_host(whole_state(trainer.model, trainer.optimizer))


def train(devices, *, before=lambda number: None, **options):
    """Train six steps, with a call before each; return the whole state."""
    with opened(devices, **options) as trainer:
        for number in range(len(SIZES)):
            before(number)
            trainer.step(*batch_of(number))
    return state_here(trainer)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("kernels", [10, 30])
def test_the_others_go_on_without_a_device_whose_kernel_fails(in_flight, kernels, caplog):
    def fail(number):
        if number == 3:
            emu.fail_after(1, kernels)

    devices = ["emu:0", "emu:1", "emu:2"]
    found = train(devices, before=fail, max_in_flight=in_flight)
    assert "emu:1 was lost" in caplog.text
    assert_same_bits(found, train("cpu:0"))


@pytest.mark.parametrize("kernels", [14, 20, 26])
def test_the_others_go_on_where_a_library_has_an_error_of_its_own_for_the_device(kernels, caplog):
    """cuBLAS and cuDNN, whose errors torch raises as a RuntimeError."""

    def objective(model, X, y):
        try:
            output = model(X)
            if X.device.type == "emu":
                torch.accelerator.synchronize(X.device.index)
        except torch.AcceleratorError:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED") from None
        return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)

    def fail(number):
        if number == 3:
            emu.fail_after(1, kernels)

    found = train(["emu:0", "emu:1", "emu:2"], before=fail, objective=objective)
    assert "emu:1 was lost" in caplog.text
    assert_same_bits(found, train("cpu:0"))


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.thinned(2)
def test_a_kernel_that_fails_anywhere_leaves_no_wrong_bit(at):
    """One that adds or copies partial sums is behind the end of a shard: it was not seen."""
    expected, same = train("cpu:0"), 0
    for kernels in range(1, 150, 7):
        emu.configure()

        def fail(number, kernels=kernels):
            if number == at:
                emu.fail_after(1, kernels)

        try:
            found = train(["emu:0", "emu:1", "emu:2"], before=fail, max_in_flight=2)
        except (DeviceLostError, torch.AcceleratorError):
            continue
        assert_same_bits(found, expected)
        same += 1
    assert same > 10


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    "devices",
    [["emu:0", "emu:1", "emu:2"], ["cpu:0", "emu:1"], ["cpu:0", "emu:2", "emu:1"]],
    ids=str,
)
@pytest.mark.thinned(2)
def test_the_others_go_on_without_a_device_that_fails_between_two_steps(devices, in_flight):
    """A CPU's lane that copies or waits then gets the error of the accelerator."""
    expected = train("cpu:0")
    for kernels in range(0, 44, 4):
        emu.configure()

        def fail(number, kernels=kernels):
            if number == 2:
                emu.fail_after(1, kernels)

        assert_same_bits(train(devices, before=fail, max_in_flight=in_flight), expected)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("kernels", [0, 2, 5])
def test_training_ends_with_a_model_s_device_that_fails_between_two_steps(kernels, in_flight):
    def fail(number):
        if number == 2:
            emu.fail_after(0, kernels)

    with pytest.raises(torch.AcceleratorError, match="emu:0") as raised:
        train(TWO, before=fail, max_in_flight=in_flight)
    assert any("load the last checkpoint" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("devices", [["emu:0", "emu:1"], ["cpu:0", "emu:1"]], ids=str)
def test_an_evaluation_goes_on_without_a_device_whose_kernel_fails(devices):
    """Its shards' tasks have ended by then: kernels fail later than they are launched."""

    def evaluate(devices, kernels=None):
        with opened(devices) as trainer:
            float(trainer.step(*batch_of(0)))
            if kernels is not None:
                emu.fail_after(1, kernels)
            found = trainer.evaluate([batch_of(1)], {"accuracy": evenstep.metrics.accuracy})
            trainer.step(*batch_of(2))
            return found, trainer.fingerprint()

    expected = evaluate("cpu:0")
    for kernels in range(0, 24, 3):
        emu.configure()
        assert evaluate(devices, kernels) == expected


MOMENTS = {
    "between two steps": (),
    "in the copy of an opening": (4, "p2p ready"),  # behind four parameters
    "in a shard": (0, "aten::native_batch_norm"),
    "in the sum": (0, "aten::add"),
    "in the copy of a partial sum": (0, "copy_"),
    "in the end of a shard": (0, "copy_ D2H"),
}


@pytest.mark.parametrize("mode", ["lazy", "thread"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.thinned(2)
def test_the_others_go_on_without_a_device_that_disappears(moment, in_flight, mode, caplog):
    emu.configure(mode, delay_us=20)

    def disappear(number):
        if number == 2:
            emu.disappear(1, *moment)

    found = train(TWO, before=disappear, max_in_flight=in_flight)
    assert "emu:1 was lost" in caplog.text
    assert_same_bits(found, train("cpu:0"))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_training_ends_with_a_model_s_device_that_disappears(moment, in_flight):
    def disappear(number):
        if number == 2:
            emu.disappear(0, *moment)

    with pytest.raises(torch.AcceleratorError, match="off the bus") as raised:
        train(TWO, before=disappear, max_in_flight=in_flight)
    assert any("load the last checkpoint" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("devices", [["emu:0", "emu:1"], ["cpu:0", "emu:1"]], ids=str)
@pytest.mark.parametrize("kernels", [-1, *range(0, 80, 9)])
@pytest.mark.thinned(2)
def test_all_of_a_training_goes_on_without_a_device_that_has_disappeared(
    kernels, devices, tmp_path
):
    """Steps, evaluations, and a save in the handler of a signal that comes in an evaluation."""

    def pressing(output, y):
        if not saved:
            signal.raise_signal(signal.SIGTERM)
        return evenstep.metrics.accuracy(output, y)

    def results(devices, kernels=None):
        saved.clear()
        with opened(devices) as trainer:

            def save(*_):
                saved.append(trainer.save(tmp_path / f"{devices}"))

            float(trainer.step(*batch_of(0)))
            if kernels is not None:
                emu.disappear(1, kernels)
            found = trainer.evaluate([batch_of(1)], {"accuracy": evenstep.metrics.accuracy})
            found["outputs"] = trainer.predict([batch_of(2)[:1]]).tolist()
            trainer.step(*batch_of(2))
            before = signal.signal(signal.SIGTERM, save)
            trainer.evaluate([batch_of(1)], {"accuracy": pressing})
            signal.signal(signal.SIGTERM, before)
            assert saved
            trainer.step(*batch_of(3))
            return found, trainer.fingerprint()

    saved = []
    assert results(devices, kernels) == results("cpu:0")


def test_the_others_go_on_without_a_device_that_stands_still(caplog):
    stops = []

    def objective(model, X, y):
        if stops and X.device.index == 1:
            torch.accelerator.synchronize(0)  # which gives it the parameters
            torch.accelerator.synchronize(1)
            emu.stand_still(1)
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    faults = evenstep.Faults(lost_after_s=0.3)
    with opened(objective=objective, faults=faults) as trainer:
        for number in range(len(SIZES)):
            if number == 3:
                stops.append(True)
            trainer.step(*batch_of(number))
    assert "emu:1 was lost" in caplog.text
    assert_same_bits(state_here(trainer), train("cpu:0"))


def test_the_times_of_shards_are_those_of_their_kernels():
    delay_s, least_kernels = 3e-3, 10  # of a shard
    with opened() as trainer:
        emu.slow_down(1, int(delay_s * 1e6))
        for number in range(len(SIZES)):
            float(trainer.step(*batch_of(number)))
        slow = next(share for share in trainer.shares() if share.device == "emu:1")
    assert slow.shards
    assert slow.compute_s > slow.shards * least_kernels * delay_s
    assert_same_bits(state_here(trainer), train("cpu:0"))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("device", [0, 1])
def test_a_step_without_enough_memory_changes_nothing_and_can_be_repeated(
    device, in_flight, caplog
):
    with opened(max_in_flight=in_flight) as trainer:
        for number in range(2):
            trainer.step(*batch_of(number))
        opening = trainer.fingerprint()
        free, whole = torch.accelerator.get_memory_info(device)
        emu.limit_memory(device, whole - free + 1024)
        with pytest.raises(torch.OutOfMemoryError):
            float(trainer.step(*batch_of(2)))
        emu.limit_memory(device, whole)
        assert trainer.fingerprint() == opening
        for number in range(2, len(SIZES)):
            trainer.step(*batch_of(number))
    assert "was lost" not in caplog.text
    assert_same_bits(state_here(trainer), train("cpu:0"))


def test_a_label_that_is_no_class_is_the_program_s_mistake(caplog):
    X, y = batch_of(0)
    with opened() as trainer:
        for _ in range(3):
            trainer.step(X, y)
        y[-1] = 7  # on the second device
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            trainer.step(X, y)
    assert "was lost" not in caplog.text


def test_ctrl_c_is_heard_while_a_device_stands_still():
    with opened(faults=evenstep.Faults(lost_after_s=math.inf)) as trainer:
        float(trainer.step(*batch_of(0)))
        opening = state_here(trainer)
        emu.stand_still(1)

        def interrupt():
            wait_until(lambda: emu.pending(1) > 0)
            _thread.interrupt_main()
            emu.stand_still(1, still=False)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            trainer.step(*batch_of(1))
        thread.join()
        assert_same_bits(state_here(trainer), opening)


def test_buffers_are_put_back_behind_the_kernels_of_a_shard_that_failed():
    fails = []

    def objective(model, X, y):
        output = model(X)
        if fails and len(X) == 5:
            raise ArithmeticError("as asked for")
        return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)

    with opened(objective=objective) as trainer:
        for seed in range(4):
            emu.configure("random", seed)
            float(trainer.step(*batch_of(1)))
            opening = state_here(trainer)
            fails.append(True)
            with pytest.raises(ArithmeticError):
                trainer.step(*batch_of(1))
            fails.clear()
            assert_same_bits(state_here(trainer), opening)
