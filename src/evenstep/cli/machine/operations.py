"""`evenstep doctor --model`: which operations of a model are portable."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from evenstep.arithmetic.mode import Survey
from evenstep.cli.training.setup import load_data
from evenstep.errors import counted
from evenstep.models.registry import blamed_on_model, find_factory

_EXAMPLES = 8  # of the batch that the model is tried with


def operations(model: str, data: str) -> Iterator[str]:
    """Yield lines on the operations of one training step: forward, backward, SGD.

    Args:
        model: the name of a model, as in `evenstep train`.
        data: the name of the data set that it is tried with.
    """
    examples = load_data(data, None, train=True)
    images, labels = examples[:_EXAMPLES]
    survey = Survey()
    with survey, blamed_on_model(model, lambda: "in a training step"):
        network = find_factory(model)()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    count, refused = len(survey.found), sorted(survey.refused)
    if not refused:
        yield f"{model}: all {count} operations are portable"
        return
    yield f"{model}: {counted(len(refused), 'operation')} of {count} have no portable kernel"
    yield from (f"  {name}" for name in refused)
