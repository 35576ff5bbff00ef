"""Whatever format the images have in memory, the user's own tensors keep theirs."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import evenstep
from evenstep.checkpoint.fingerprint import fingerprint
from evenstep.errors import InputError
from grouping import grouped
from layouts import own
from reference import assert_same_bits, plain_training, reference_training
from trainers import sgd, take_steps
from zoo import CLASSES

LOSS = nn.CrossEntropyLoss()
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Flat(nn.Module):
    """Flattens with `view`, as most programs do."""

    def forward(self, x):
        return x.view(x.size(0), -1)


class ByRows(torch.optim.Optimizer):
    """Writes through flat views of the weights and of their gradients, as Muon does."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.grad.view(len(parameter), -1)
            parameter.data.reshape(-1).add_(rows.reshape(-1), alpha=-0.1)


def images(examples=16, memory_format=torch.contiguous_format):
    torch.manual_seed(1)
    X, y = torch.randn(examples, 3, 8, 8), torch.randint(CLASSES, (examples,))
    return X.to(memory_format=memory_format), y


def convolutions(memory_format=torch.contiguous_format, flatten=nn.Flatten):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3), flatten(),
        nn.Linear(256, CLASSES),
    )  # fmt: skip
    return model.to(memory_format=memory_format)


def strides_of(model, optimizer):
    """Return the strides of weights, gradients and the optimizer's state."""
    strides = {name: value.stride() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        strides[f"gradient of {name}"] = parameter.grad.stride()
        for key, value in optimizer.state[parameter].items():
            strides[f"{key} of {name}"] = value.stride()
    return strides


def plain_steps(model, optimizer, X, y, steps=2):
    plain_training(model, optimizer, [(X, y)] * steps, LOSS)
    return model, optimizer


def evenly(model, optimizer, X, y, steps=2, **options):
    with evenstep.Trainer(model, optimizer, LOSS, **grouped(**options)) as trainer:
        for _ in range(steps):
            trainer.step(X, y)
    return model, optimizer


@functools.cache
def plain_strides(weights):
    plain = convolutions(FORMATS[weights])
    return strides_of(*plain_steps(plain, sgd(plain), *images()))


@pytest.mark.parametrize("wanted", ["preserve", *FORMATS])
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("devices", "max_in_flight"), [(1, 2), (2, 1), (own(2), 1), (own(2), 2)])
@pytest.mark.thinned(2)
def test_all_tensors_keep_the_users_strides(devices, max_in_flight, weights, wanted):
    model = convolutions(FORMATS[weights])
    optimizer = sgd(model)
    options = {"devices": devices, "max_in_flight": max_in_flight, "memory_format": wanted}
    with evenstep.Trainer(model, optimizer, LOSS, **grouped(shards=4, **options)) as trainer:
        trainer.step(*images())
        trainer.step(*images())
        trainer.waitall()
        assert strides_of(model, optimizer) == plain_strides(weights)
    assert strides_of(model, optimizer) == plain_strides(weights)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("given", FORMATS)
def test_one_shard_is_the_plain_step(given, weights):
    batch = images(memory_format=FORMATS[given])
    plain, model = (convolutions(FORMATS[weights]) for _ in range(2))
    expected = fingerprint(*plain_steps(plain, sgd(plain), *batch))
    assert fingerprint(*evenly(model, sgd(model), *batch, devices=1, shards=1)) == expected


def test_channels_last_is_the_plain_step_on_channels_last_images():
    plain, model = convolutions(), convolutions()
    expected = fingerprint(
        *plain_steps(plain, sgd(plain), *images(memory_format=torch.channels_last))
    )
    options = {"devices": 1, "shards": 1, "memory_format": "channels_last"}
    assert fingerprint(*evenly(model, sgd(model), *images(), **options)) == expected


@pytest.mark.parametrize("devices", [1, 2, own(2)], ids=str)
def test_programs_that_flatten_with_view_train_as_in_plain_torch(devices):
    batches = [images(), images()]
    expected, _ = reference_training(convolutions(flatten=Flat), ByRows, batches, shards=4)
    model = convolutions(flatten=Flat)
    trainer = evenstep.Trainer(model, ByRows(model.parameters()), LOSS, devices=devices, shards=4)
    assert_same_bits(take_steps(trainer, batches), expected)
    assert not model[0].weight.equal(convolutions()[0].weight)


def test_safetensors_takes_a_state_dict_of_a_model_in_training(tmp_path):
    model = convolutions()
    options = grouped(devices=2, memory_format="channels_last")
    with evenstep.Trainer(model, sgd(model), LOSS, **options) as trainer:
        trainer.step(*images(64))
        save_file(model.state_dict(), tmp_path / "open.safetensors")
    save_file(model.state_dict(), tmp_path / "closed.safetensors")
    for file in tmp_path.iterdir():
        for name, tensor in load_file(file).items():
            assert tensor.equal(model.state_dict()[name])


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("shards", [1, 4])
def test_fused_optimizers_have_the_same_bits_on_all_layouts(shards, weights):
    """They read memory without regard to strides: all of a weight's tensors must have its own."""

    def trained(devices):
        model = convolutions(FORMATS[weights])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        options = {"devices": devices, "shards": shards, "memory_format": "channels_last"}
        with evenstep.Trainer(model, optimizer, LOSS, **grouped(**options)) as trainer:
            for _ in range(3):
                trainer.step(*images())
        with trainer:
            trainer.step(*images())
            return trainer.fingerprint()

    assert len({trained(devices) for devices in (1, 2, own(2))}) == 1


@pytest.mark.parametrize(("saved", "loaded"), [(0, 1), (1, 0), (0, 0)], ids=str)
def test_state_that_followed_its_weight_follows_the_weight_it_is_loaded_for(
    tmp_path, saved, loaded
):
    """As in checkpoints of version 0.1.0, which turned weights channels-last."""
    formats = [*FORMATS.values()]
    model = convolutions(formats[saved])
    with evenstep.Trainer(model, sgd(model), LOSS, devices=1) as trainer:
        trainer.step(*images(64))
        trainer.save(tmp_path)
    model = convolutions(formats[loaded])
    optimizer = sgd(model)
    resumed = evenstep.Trainer.load(tmp_path, model, optimizer, LOSS, devices=1)
    assert resumed.fingerprint() == trainer.fingerprint()
    for parameter in model.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].stride() == parameter.stride()


# ---- a convolution that crashes, or gets wrong gradients, for channels-last images


def residual(stride=2, channels=4):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.Conv2d(channels, 8, 1, stride),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )


def large_images():
    torch.manual_seed(1)
    return torch.randn(16, 3, 32, 32), torch.randint(CLASSES, (16,))


def channels_last(model):
    options = grouped(devices=1, memory_format="channels_last")
    return evenstep.Trainer(model, sgd(model), LOSS, **options)


def test_channels_last_is_refused_for_a_convolution_that_would_crash():
    model = residual()
    model(large_images()[0])
    with pytest.raises(InputError, match=r"'1'.*oneDNN/issues/6035"):
        channels_last(model)
    model[0].to(memory_format=torch.channels_last)
    with pytest.raises(InputError, match=r"'0\.weight'.*oneDNN/issues/6035"):
        evenstep.Trainer(model, sgd(model), LOSS, devices=1)


@pytest.mark.parametrize(("stride", "channels"), [(1, 4), (2, 16)])
def test_channels_last_is_not_refused_for_others(stride, channels):
    model = residual(stride, channels)
    model(large_images()[0])
    channels_last(model)


PROGRAM = """
import sys, torch, evenstep
from test_memory_format import LOSS, large_images, residual
X, y = large_images()
plain, model = residual(), residual()
plain(X), model(X)
model.load_state_dict(plain.state_dict())
plain.double()
LOSS(plain(X.double()), y).backward()
X = X.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with evenstep.Trainer(model, optimizer, LOSS, devices=1, shards=2) as trainer:
    trainer.backward(X, y)
for ours, its in zip(model.parameters(), plain.parameters()):
    torch.testing.assert_close(ours.grad.double(), its.grad, rtol=1e-3, atol=1e-5)
"""


@pytest.mark.slow  # a fresh process
def test_batches_that_are_channels_last_train_such_a_convolution():
    """As a processor without AVX-512 computes it, where plain torch crashes."""
    environment = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "PYTHONPATH": os.pathsep.join(
            path for path in [str(Path(__file__).parent), *sys.path] if path
        ),
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=200)
