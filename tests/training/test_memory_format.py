"""The user's tensors keep the user's memory layout, whatever layout the images are computed in."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import evenstep
from evenstep.checkpoint.fingerprint import fingerprint
from layouts import own
from trainers import sgd
from zoo import CLASSES

LOSS = nn.CrossEntropyLoss()
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def images(examples=16):
    torch.manual_seed(1)
    return torch.randn(examples, 3, 8, 8), torch.randint(CLASSES, (examples,))


def convolutions(memory_format=torch.contiguous_format):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3), nn.Flatten(),
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


def plain_steps(memory_format, steps=2):
    """Take the steps of a plain loop on channels-last images; return model and optimizer."""
    model = convolutions(memory_format)
    optimizer = sgd(model)
    X, y = images()
    for _ in range(steps):
        optimizer.zero_grad()
        LOSS(model(X.contiguous(memory_format=torch.channels_last)), y).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("devices", [1, 2, own(2)], ids=str)
def test_a_state_dict_and_the_closed_trainer_have_the_users_layout(
    devices, max_in_flight, memory_format
):
    expected = strides_of(*plain_steps(FORMATS[memory_format]))
    model = convolutions(FORMATS[memory_format])
    optimizer = sgd(model)
    with evenstep.Trainer(
        model, optimizer, LOSS, devices=devices, shards=4, max_in_flight=max_in_flight
    ) as trainer:
        assert trainer.experiment.memory_format == "channels_last"
        trainer.step(*images())
        trainer.step(*images())
        trainer.waitall()
        strides = {name: value.stride() for name, value in model.state_dict().items()}
        assert strides.items() <= expected.items()
        conv = {name: value.stride() for name, value in model[0].state_dict().items()}
        assert conv == {name: strides[f"0.{name}"] for name in conv}
    assert strides_of(model, optimizer) == expected


def test_with_one_shard_a_step_is_the_plain_step_on_channels_last_images():
    plain, its_optimizer = plain_steps(torch.contiguous_format)
    model = convolutions()
    optimizer = sgd(model)
    with evenstep.Trainer(model, optimizer, LOSS, devices=1, shards=1) as trainer:
        trainer.step(*images())
        trainer.step(*images())
    assert fingerprint(model, optimizer) == fingerprint(plain, its_optimizer)


def test_safetensors_takes_a_state_dict_of_a_model_in_training(tmp_path):
    model = convolutions()
    with evenstep.Trainer(model, sgd(model), LOSS, devices=2) as trainer:
        trainer.step(*images(64))
        save_file(model.state_dict(), tmp_path / "open.safetensors")
    save_file(model.state_dict(), tmp_path / "closed.safetensors")
    for file in tmp_path.iterdir():
        for name, tensor in load_file(file).items():
            assert tensor.equal(model.state_dict()[name])


@pytest.mark.parametrize("shards", [1, 4])
def test_the_layout_of_weights_does_not_move_bits(shards):
    """Fused optimizers read memory without regard to strides: all of a weight's must be equal."""

    def trained(memory_format, devices):
        model = convolutions(memory_format)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        with evenstep.Trainer(model, optimizer, LOSS, devices=devices, shards=shards) as trainer:
            for _ in range(3):
                trainer.step(*images())
        with trainer:
            trainer.step(*images())
            return trainer.fingerprint()

    layouts = [(one, devices) for one in FORMATS.values() for devices in (1, 2, own(2))]
    assert len({trained(*layout) for layout in layouts}) == 1


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
