"""A network in stages, each on an accelerator of its own, has the bits of one CPU device."""

import itertools
import random
import threading

import pytest
import torch
from test_lost import batch_of, make_model
from test_lost import train as train_small
from test_random_layouts import ADAM, MOMENTUM, assert_reference
from test_waits import BESIDES, SHARDS, waits_of_steps
from torch import nn

import emu
import evenstep
from crossing_models import Checkpointed, Fanned, Gated, Passing, Skips, Taught
from evenstep.errors import DeviceLostError, InputError
from good_models import MODELS
from reference import assert_same_bits, whole_state
from test_sameness import ROUNDED, UNFIT, assert_bits_of_a_cpu
from zoo import build, make_batches

LAYOUTS = {
    "2": (["emu:0", "emu:1"], "balanced"),
    "4": (["emu:2", "emu:0", "emu:1", "emu:3"], "balanced"),
    "two replicas": (["emu:0", "emu:1", "emu:2", "emu:3"], "balanced:2"),
    "two replicas, crossed": (["emu:0", "emu:1", "emu:1", "emu:0"], "balanced:2"),
    "there and back": (["emu:0", "emu:1", "emu:0", "emu:1"], "balanced"),
    "all on one": (["emu:1", "emu:1"], "balanced"),
}
TWO = {"devices": ["emu:0", "emu:1"], "divide": evenstep.Stages("balanced")}
UNDIVIDED = {
    "batch taken apart": "it has no parts",
    "tied autoencoder": "it is one part",
    "synchronised batch norm": "no shard waits for others between stages",
    "inner steps": "functions that torch.func transforms don't take copies between devices",
}
"""The models that can't have two stages, and why."""


def two(**options):
    return {"devices": TWO["devices"], "layout": evenstep.Layout(divide=TWO["divide"]), **options}


@pytest.mark.parametrize("mode", emu.MODES)
@pytest.mark.parametrize(("devices", "names"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.thinned(3)
def test_every_layout_in_every_mode(mode, devices, names, in_flight):
    emu.configure(mode, seed=in_flight, delay_us=20)
    layout = {"devices": devices, "divide": evenstep.Stages(names)}
    assert_bits_of_a_cpu(MODELS["causal convolutions"], max_in_flight=in_flight, **layout)


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in {*UNFIT, *ROUNDED, *UNDIVIDED}]
)
@pytest.mark.thinned(3)
def test_every_model(name):
    assert_bits_of_a_cpu(MODELS[name], **TWO)


@pytest.mark.parametrize("name", UNDIVIDED)
def test_no_model_is_left_out_that_could_have_stages(name):
    with pytest.raises((evenstep.errors.EvenstepError, NotImplementedError, RuntimeError)):
        assert_bits_of_a_cpu(MODELS[name], **TWO)


def drawn(seed):
    """Return a random experiment, and a random layout in stages."""
    draw = random.Random(seed)
    name = draw.choice(("attention", "batch_norm", "convolution", "dropout"))
    shards = draw.randint(1, 9)
    sizes = (shards * draw.randint(2, 4), shards * 2 + draw.randint(0, 3), shards * 2)
    devices = draw.choices(
        [f"emu:{number}" for number in range(emu.DEVICES)], k=draw.choice((2, 4))
    )
    layout = {"devices": devices, "max_in_flight": draw.randint(1, 3)}
    layout["divide"] = evenstep.Stages("balanced:2")
    experiment = name, sizes, shards, draw.choice((MOMENTUM, ADAM))
    return experiment, layout, draw.choice(emu.MODES), draw.choice((1, 20, 200))


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.thinned(10)
def test_random_stages_have_the_bits_of_the_reference(seed):
    experiment, layout, mode, delay_us = drawn(seed)
    assert_reference(experiment, layout, mode, seed, delay_us)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(12))

    def forward(self, x):
        return x + self.shift


class Overwritten(nn.Module):
    """Writes to a tensor that a later stage has a copy of."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.late, self.head = nn.Linear(36, 12), Shifted(), nn.Linear(12, 10)

    def forward(self, x):
        x = self.stem(x.flatten(1))
        y = self.late(x)
        x.mul_(2.0)
        return self.head(y + self.late(x))


class ThereAndBack(nn.Module):
    """Goes through both stages twice, and uses a tensor in each of the four visits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.early, self.late = nn.Linear(36, 12), Gated(), Gated()
        self.head = nn.Linear(12, 10)

    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        y = self.early(x) * self.late(x) + x
        y = y + x * self.early(x).sin() * x
        return self.head(self.late(x) * y - x)


class Indexed(nn.Module):
    """Uses parts and views of a tensor of the first stage between uses in the second."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.late, self.head = nn.Linear(36, 12), Gated(), nn.Linear(12, 10)

    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        y = self.late(x)
        y = y * x[:, [*range(12)]] + self.late(x).sin()
        y = y * x.T.T + self.late(x).cos()
        y = y * (1 - x) + self.late(x)
        y = y * x.to(torch.float64).float() + self.late(x)
        return self.head(y * (2.0 / (3 + x)) * x.mT.mT)


class WithItsLoss(nn.Module):
    """Returns its loss, which it computes of a batch that no module gets, in a dict of a class."""

    class Output(dict):
        pass

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(36, 12), nn.Linear(12, 10)

    def forward(self, x, y):
        logits = self.head(self.stem(x.flatten(1)).tanh())
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        return self.Output(loss=loss, logits=[logits])


def penalised(model, x, y):
    """A loss of the output and of a parameter in each stage."""
    penalty = sum((one**2).sum() for one in model.parameters())
    return nn.functional.cross_entropy(model(x), y, reduction="sum") + len(x) * penalty, len(x)


def own_loss(model, x, y):
    output = model(x, y)
    return output["loss"] + output["logits"][0].square().sum(), len(x)


CASES = {
    **{make.__name__: (make, {"stem": 0, "late": 1}, None) for make in (Skips, Passing, Taught)},
    "Fanned": (Fanned, {"stem": 0, "two": 1, "three": 2, "head": 3}, None),
    "Fanned, regularised": (Fanned, {"stem": 0, "two": 1, "three": 2, "head": 3}, penalised),
    **{
        f"Checkpointed, from {first} on": (
            lambda: Checkpointed(reentrant=False),
            {"one": 0, first: 1},
            None,
        )
        for first in ("two", "three")
    },
    "Indexed": (Indexed, {"stem": 0, "late": 1}, None),
    "Overwritten": (Overwritten, {"stem": 0, "late": 1}, None),
    "ThereAndBack": (ThereAndBack, {"stem": 0, "late": 1}, None),
    "ThereAndBack, regularised": (ThereAndBack, {"stem": 0, "late": 1, "head": 2}, penalised),
    "WithItsLoss": (WithItsLoss, {"stem": 0, "head": 1}, own_loss),
}


@pytest.mark.parametrize("mode", ["lazy", "random"])
@pytest.mark.parametrize(("make", "names", "objective"), CASES.values(), ids=CASES)
def test_tensors_that_several_stages_use(make, names, objective, mode):
    def train(**layout):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loss = None if objective else nn.CrossEntropyLoss()
        given = {"objective": objective} if objective else {}
        with evenstep.Trainer(model, optimizer, loss, **given, shards=4, **layout) as trainer:
            losses = [float(trainer.step(*batch)) for batch in make_batches((19, 16, 8))]
        return emu.on_the_host(whole_state(model, optimizer)), losses

    expected, expected_losses = train(devices="cpu:0")
    emu.configure(mode, seed=3)
    devices = [f"emu:{stage}" for stage in range(max(names.values()) + 1)]
    layout = evenstep.Layout(divide=evenstep.Stages(names))
    found, losses = train(devices=devices, layout=layout)
    assert_same_bits(found, expected)
    assert losses == expected_losses


# ---- what users do besides steps


def open_trainer(model, optimizer, **options):
    return evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **two(**options))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_a_training_is_resumed_from_stages_on_a_cpu_and_back(tmp_path):
    batches = make_batches((33, 16, 30, 24, 19, 20))

    def train(folder, layouts):
        for number, layout in enumerate(layouts):
            model = build("dropout")
            optimizer = momentum(model)
            given = model, optimizer, nn.CrossEntropyLoss()
            if number:
                trainer = evenstep.Trainer.load(folder, *given, **layout)
            else:
                trainer = evenstep.Trainer(*given, **layout)
            with trainer:
                each = len(batches) // len(layouts)
                for batch in batches[number * each : (number + 1) * each]:
                    trainer.step(*batch)
                trainer.save(folder)
        return emu.on_the_host(whole_state(model, optimizer))

    expected = train(tmp_path / "plain", [{"devices": "cpu:0"}])
    layouts = [two(), {"devices": "cpu:0"}, two(max_in_flight=2)]
    assert_same_bits(train(tmp_path / "stages", layouts), expected)


def test_each_device_holds_the_parameters_and_buffers_of_its_stage():
    model = build("batch_norm")
    with open_trainer(model, momentum(model)) as trainer:
        trainer.step(*make_batches((16,))[0])
        executor = trainer._executor
        replica, stages = executor._replica(0), executor.stages
        for name, tensor in [
            *replica.module.named_parameters(),
            *replica.module.named_buffers(),
        ]:
            assert tensor.device.index == stages.of_module[name.rpartition(".")[0]], name
        assert {one.device.index for one in replica.module.parameters()} == {0, 1}


def test_code_that_breaks_the_contract_is_refused():
    calls = itertools.count()

    def objective(model, X, y):
        X = X + next(calls)
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    model = make_model()
    optimizer = momentum(model)
    with (
        evenstep.Trainer(model, optimizer, objective=objective, **two()) as trainer,
        pytest.raises(evenstep.errors.ContractError, match="gives two results"),
    ):
        trainer.step(*batch_of(0))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Between(Indexed):
    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        y = self.late(x) + Doubled.apply(x)
        return self.head(y + self.late(x))


def test_a_function_that_would_change_the_order_of_gradients_is_refused():
    model = Between()
    layout = evenstep.Layout(divide=evenstep.Stages({"stem": 0, "late": 1}))
    with (
        evenstep.Trainer(
            model, momentum(model), nn.CrossEntropyLoss(), **two(layout=layout)
        ) as trainer,
        pytest.raises(evenstep.errors.ContractError, match="DoubledBackward uses a tensor"),
    ):
        trainer.step(*make_batches((16,))[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"devices": ["emu:0", "cpu:0"]}, "one kind"),
        ({"layout": evenstep.Layout(divide=evenstep.Stages("balanced:time"))}, "measured on CPUs"),
    ],
)
def test_what_stages_on_accelerators_can_t_do_is_refused(options, expected):
    model = make_model()
    with pytest.raises(InputError, match=expected):
        evenstep.Trainer(model, momentum(model), nn.CrossEntropyLoss(), **two(**options))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_blocks_nowhere_and_polls_a_few_events_on_each_device(in_flight):
    for waits in waits_of_steps("lenet", max_in_flight=in_flight, **two()):
        polled = waits.pop(emu.POLLING)
        assert not waits
        copies = SHARDS * (in_flight > 1)  # made ahead, and waited for: the batch may be written
        assert polled <= 2 * (SHARDS + BESIDES) + copies, polled


# ---- times, and devices that fail


def test_stages_compute_at_the_same_time_and_their_times_are_those_of_their_kernels():
    delay_s, kernels = 2e-3, 4  # a shard has at least so many in each stage
    model = make_model()
    with open_trainer(model, momentum(model), shards=4) as trainer:
        for number in range(2):
            float(trainer.step(*batch_of(number)))
        emu.configure("thread")
        for device in range(2):
            emu.slow_down(device, int(delay_s * 1e6))
        for number in range(2, 4):
            float(trainer.step(*batch_of(number)))
        trainer.waitall()
        visits = [one for one in trainer.trace.spans if one.category == "compute"]
    visits = [one for one in visits if one.story and one.story["step"] == 3]
    assert {(one.row, one.story["stage"]) for one in visits} == {(0, 0), (1, 1)}
    assert all(one.ended_s - one.began_s > kernels * delay_s for one in visits if one.row == 0)
    assert any(
        one.story["shard"] != two.story["shard"]
        and one.began_s < two.ended_s
        and two.began_s < one.ended_s
        for one, two in itertools.product(visits, visits)
        if one.row < two.row
    )


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.thinned(2)
def test_a_kernel_that_fails_anywhere_leaves_no_wrong_bit(at, device):
    expected, named = train_small("cpu:0"), []
    for kernels in range(1, 150, 11):
        emu.configure()

        def fail(number, kernels=kernels):
            if number == at:
                emu.fail_after(device, kernels)

        layout = {"layout": two()["layout"], "max_in_flight": 2}
        try:
            found = train_small(TWO["devices"], before=fail, **layout)
        except (DeviceLostError, torch.AcceleratorError) as error:
            named.append(
                f"emu:{device}" in "\n".join([str(error), *getattr(error, "__notes__", ())])
            )
        else:
            assert_same_bits(found, expected)
    assert len(named) > 5
    assert all(named)


def test_a_stage_whose_device_stands_still_is_named():
    model, armed = make_model(), threading.Lock()
    armed.acquire()

    def objective(model, X, y):
        if armed.acquire(blocking=False):
            torch.accelerator.synchronize(0)  # which gives it the parameters
            torch.accelerator.synchronize(1)
            emu.stand_still(1)
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    with evenstep.Trainer(
        model,
        momentum(model),
        objective=objective,
        shards=4,
        faults=evenstep.Faults(lost_after_s=0.3, check="off"),
        **two(),
    ) as trainer:
        for number in range(3):
            float(trainer.step(*batch_of(number)))
        opening = trainer.fingerprint()
        armed.release()
        with pytest.raises(DeviceLostError) as raised:
            trainer.step(*batch_of(3))
        emu.stand_still(1, still=False)
        assert trainer.fingerprint() == opening
    assert "stood still on emu:1, in stage 1" in "\n".join(raised.value.__notes__)
