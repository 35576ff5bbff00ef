"""Models whose gradients autograd puts into shared memory."""

import functools

import torch
from torch import nn

from good_models.recipe import SGD, Recipe, images
from shared_gradients import SHARING, build_sharing
from zoo import CLASSES

SHARED_MEMORY = {
    f"gradients in shared memory, {name}": Recipe(
        functools.partial(build_sharing, name),
        images(size=6, classes=CLASSES),
        nn.CrossEntropyLoss(),
        make_optimizer=functools.partial(torch.optim.SGD, lr=0.1) if name == "SparseSums" else SGD,
    )
    for name in SHARING
}
