"""The reference networks: their layers, counted by hand, and what they compute."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenstep import models
from evenstep.models.resnet import Residual


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def conv(inputs: int, outputs: int, kernel: int) -> int:
    return inputs * outputs * kernel**2 + outputs


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def batch_norm(channels: int) -> int:
    return 2 * channels


def residual(inputs: int, outputs: int) -> int:
    shortcut = 0 if inputs == outputs else conv(inputs, outputs, 1)
    return conv(inputs, outputs, 3) + conv(outputs, outputs, 3) + 2 * batch_norm(outputs) + shortcut


def test_mlp_has_the_parameters_of_its_layers():
    expected = linear(784, 256) + linear(256, 128) + linear(128, 10)
    assert count(models.mlp()) == expected
    assert count(models.mlp(12, hidden=(), num_classes=3)) == linear(12, 3)


def test_lenet_has_the_parameters_of_its_layers():
    expected = conv(1, 20, 3) + conv(20, 50, 5) + linear(800, 128) + linear(128, 10)
    assert count(models.lenet()) == expected


def test_resnet18_has_the_parameters_of_its_layers():
    stages = [(64, 64), (64, 128), (128, 256), (256, 512)]
    expected = (
        conv(1, 64, 3)
        + batch_norm(64)
        + sum(residual(i, o) + residual(o, o) for i, o in stages)
        + linear(512, 10)
    )
    assert count(models.resnet18()) == expected


@pytest.mark.parametrize("factory", [models.lenet, models.resnet18])
def test_images_become_scores(factory):
    model = factory(num_classes=7, in_channels=3)
    assert model(torch.rand(2, 3, 28, 28)).shape == (2, 7)


def test_mlp_flattens_images():
    assert models.mlp(num_classes=7)(torch.rand(3, 1, 28, 28)).shape == (3, 7)


def test_lenet_computes_the_book_s_formula():
    model = models.lenet()
    w1, b1, w2, b2, w3, b3, w4, b4 = model.parameters()
    x = torch.rand(3, 1, 28, 28)
    h1 = F.avg_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, w2, b2)), 2)
    scores = F.relu(h2.flatten(1) @ w3.T + b3) @ w4.T + b4
    torch.testing.assert_close(model(x), scores)


def test_initialisation_is_torch_s_own():
    torch.manual_seed(5)
    model = models.lenet()
    torch.manual_seed(5)
    layers = [nn.Conv2d(1, 20, 3), nn.Conv2d(20, 50, 5), nn.Linear(800, 128), nn.Linear(128, 10)]
    expected = [parameter for layer in layers for parameter in layer.parameters()]
    assert all(map(torch.equal, model.parameters(), expected))


def test_resnet18_children_have_the_book_s_names():
    names = [name for name, _ in models.resnet18().named_children()]
    blocks = [f"resnet_block{number}" for number in (1, 2, 3, 4)]
    assert names == ["0", "1", "2", *blocks, "global_avg_pool", "fc"]


def test_resnet18_halves_the_image_at_every_stage_but_the_first():
    shapes = {}
    x = torch.rand(2, 1, 28, 28)
    for name, child in models.resnet18().named_children():
        x = child(x)
        shapes[name] = tuple(x.shape[1:])
    assert shapes["resnet_block1"] == (64, 28, 28)
    assert shapes["resnet_block2"] == (128, 14, 14)
    assert shapes["resnet_block3"] == (256, 7, 7)
    assert shapes["resnet_block4"] == (512, 4, 4)
    assert shapes["global_avg_pool"] == (512, 1, 1)


def test_a_residual_whose_branch_is_silent_passes_its_input():
    block = Residual(4, 4)
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(block(x), F.relu(x))


def test_the_shortcut_s_convolution_has_no_batch_norm():
    block = Residual(4, 6, use_1x1conv=True, stride=2)
    nn.init.zeros_(block.bn2.weight)
    x = torch.randn(2, 4, 7, 7)
    assert torch.equal(block(x), F.relu(block.conv3(x)))


def test_a_residual_computes_the_book_s_formula():
    block = Residual(3, 5, use_1x1conv=True, stride=2).eval()
    x = torch.randn(2, 3, 8, 8)
    y = F.relu(block.bn1(F.conv2d(x, block.conv1.weight, block.conv1.bias, 2, 1)))
    y = block.bn2(F.conv2d(y, block.conv2.weight, block.conv2.bias, 1, 1))
    shortcut = F.conv2d(x, block.conv3.weight, block.conv3.bias, 2)
    assert torch.equal(block(x), F.relu(y + shortcut))


def test_gpt_has_the_parameters_of_its_layers():
    norm = 2 * 128
    block = norm + linear(128, 384) + linear(128, 128) + norm + linear(128, 512) + linear(512, 128)
    model = models.gpt(layers=4, heads=4, width=128, context=32)
    assert count(model) == 65 * 128 + 32 * 128 + 4 * block + norm  # the output layer has no own


def test_gpt_looks_at_no_later_tokens():
    torch.manual_seed(0)
    model = models.gpt(layers=2, heads=2, width=32, context=16).eval()
    tokens = torch.randint(65, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 65
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 65)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
