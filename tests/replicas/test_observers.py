"""Quantisation-aware training: observers of ranges see the batch, on any devices."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.ao.nn import qat
from torch.ao.quantization import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    disable_observer,
)

from evenstep.errors import ContractError, ModelError
from layouts import own
from reference import assert_same_bits, plain_training, whole_state
from trainers import open_trainer, sgd

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")

DEVICES = [1, 2, own(2)]
BATCHES = [
    (scale * torch.randn(32, 6, generator=torch.Generator().manual_seed(number)), labels)
    for number, (scale, labels) in enumerate([(1, torch.arange(32) % 4), (3, torch.arange(32) % 4)])
]


def quantiser(observer, **settings):
    return functools.partial(FakeQuantize, observer, quant_min=0, quant_max=255, **settings)


OBSERVERS = {"min max": MinMaxObserver, "moving average": MovingAverageMinMaxObserver}
PER_CHANNEL = {
    "min max": functools.partial(PerChannelMinMaxObserver, ch_axis=1),
    "moving average": functools.partial(MovingAveragePerChannelMinMaxObserver, ch_axis=1),
    "quantised": quantiser(
        MovingAveragePerChannelMinMaxObserver, ch_axis=1, qscheme=torch.per_channel_affine
    ),
}
QUANTISERS = {
    "min max": quantiser(MinMaxObserver),
    "moving average": quantiser(MovingAverageMinMaxObserver),
    "fused": functools.partial(
        FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    ),
}
ALL = {
    **{f"observer, {name}": make for name, make in OBSERVERS.items()},
    **{f"quantiser, {name}": make for name, make in QUANTISERS.items()},
}


def built(make):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), make(), nn.Linear(8, 4))


def trained(model, steps=2, **layout):
    with open_trainer(model, **layout) as trainer:
        for batch in (BATCHES * steps)[: 2 * steps]:
            trainer.step(*batch)
    return whole_state(model, trainer.optimizer)


everywhere = pytest.mark.parametrize("devices", DEVICES, ids=str)
every_observer = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
by_channel = pytest.mark.parametrize("make", PER_CHANNEL.values(), ids=PER_CHANNEL)


@every_observer
@pytest.mark.parametrize("layout", [{"devices": 2}, {"devices": own(2)},
                                    {"devices": 2, "max_in_flight": 2}], ids=str)  # fmt: skip
@pytest.mark.thinned(2)
def test_every_layout_has_the_same_bits(make, layout):
    assert_same_bits(trained(built(make), **layout), trained(built(make), devices=1))


@every_observer
@pytest.mark.parametrize("devices", [1, 2])
def test_one_shard_is_the_plain_loop(make, devices):
    plain = built(make)
    optimizer = sgd(plain)
    plain_training(plain, optimizer, BATCHES * 2)
    state = trained(built(make), devices=devices, shards=1)
    assert_same_bits(state, whole_state(plain, optimizer))


@every_observer
@pytest.mark.parametrize("devices", [1, own(2)], ids=str)
def test_a_step_leaves_the_range_of_the_batch(make, devices):
    """As if a plain forward pass had seen the whole batch; the scale belongs to the range."""
    model = built(make)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    with open_trainer(model, optimizer=optimizer, devices=devices) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
    with torch.no_grad():
        for X, _ in BATCHES:
            plain(X)
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0, msg=name)


@everywhere
def test_a_rule_that_is_given_comes_first(devices):
    rules = {"*.min_val": "mean", "*.max_val": "first"}
    model = built(MinMaxObserver)
    trained(model, steps=1, devices=devices, buffers=rules)
    other = built(MinMaxObserver)
    trained(other, steps=1, devices=1)
    assert model[2].max_val < other[2].max_val


@pytest.mark.parametrize("make", QUANTISERS.values(), ids=QUANTISERS)
@pytest.mark.parametrize("devices", DEVICES[1:], ids=str)
def test_ranges_can_be_frozen(make, devices):
    states = []
    for layout in (1, devices):
        model = built(make)
        with open_trainer(model, devices=layout) as trainer:
            trainer.step(*BATCHES[0])
            model.apply(disable_observer)
            frozen = model[2].scale.clone()
            trainer.step(*BATCHES[1])
            assert torch.equal(model[2].scale, frozen)
        states.append(whole_state(model, trainer.optimizer))
    assert_same_bits(*states)


@by_channel
@pytest.mark.parametrize(("shards", "devices"), [(1, 2), (8, 1), (8, own(2))], ids=str)
def test_observers_without_a_shape_are_named(make, shards, devices):
    model = built(make)
    with (
        open_trainer(model, devices=devices, shards=shards) as trainer,
        pytest.raises(ModelError, match=r"buffer 2\..* changed its shape from \([01],\) to \(8,\)"),
    ):
        trainer.step(*BATCHES[0])
    before = built(make)
    assert_same_bits(dict(model.named_buffers()), dict(before.named_buffers()))


@by_channel
@pytest.mark.parametrize("devices", DEVICES[1:], ids=str)
def test_observers_that_have_seen_a_batch_have_a_shape(make, devices):
    states = []
    for layout in (1, devices):
        model = built(make)
        model(BATCHES[0][0])
        states.append(trained(model, devices=layout))
    assert_same_bits(*states)


@everywhere
def test_a_histogram_is_refused_by_the_name_of_its_buffer(devices):
    with pytest.raises(ContractError, match=r"the buffer 2\.histogram .*MovingAverageMinMax"):
        trained(built(HistogramObserver), devices=devices)


class Prepared(nn.Module):
    """Weights and activations as `prepare_qat` makes them, and batch normalisation."""

    def __init__(self):
        super().__init__()
        weights = FakeQuantize.with_args(
            observer=MovingAverageMinMaxObserver, quant_min=-127, quant_max=127,
            dtype=torch.qint8, qscheme=torch.per_tensor_symmetric,
        )  # fmt: skip
        activations = QUANTISERS["moving average"]
        config = QConfig(activation=activations, weight=weights)
        self.first, self.norm = qat.Linear(6, 8, qconfig=config), nn.BatchNorm1d(8)
        self.between, self.last = activations(), qat.Linear(8, 4, qconfig=config)

    def forward(self, x):
        return self.last(self.between(self.norm(self.first(x)).relu()))


@pytest.mark.parametrize("devices", DEVICES[1:], ids=str)
@pytest.mark.parametrize("shards", [1, 8])
def test_a_prepared_model_is_trained(devices, shards):
    assert_same_bits(
        trained(built_prepared(), devices=devices, shards=shards),
        trained(built_prepared(), devices=1, shards=shards),
    )


def built_prepared():
    torch.manual_seed(0)
    return Prepared()
