"""`evenstep doctor --model`: which operations of a model are portable."""

from __future__ import annotations

import json

import click
import torch
from torch import nn

from evenstep.arithmetic.mode import Survey
from evenstep.cli.training.setup import load_data
from evenstep.errors import counted
from evenstep.models.registry import blamed_on_model, find_factory

_EXAMPLES = 8  # of the batch that the model is tried with


def operations(model: str, data: str, *, as_json: bool) -> None:
    """Print what of a training step (forward, backward, SGD) is portable.

    Args:
        model: the name of a model, as in `evenstep train`.
        data: the name of the data set that it is tried with.
        as_json: whether to print a JSON object.
    """
    survey = _survey(model, data)
    count, refused = len(survey.found), sorted(survey.refused)
    if as_json:
        click.echo(json.dumps({"model": model, "operations": count, "refused": refused}))
    elif not refused:
        click.echo(f"{model}: all {count} operations are portable")
    else:
        click.echo(f"{model}: {counted(len(refused), 'operation')} of {count} are not portable")
        for name in refused:
            click.echo(f"  {name}")


def _survey(model: str, data: str) -> Survey:
    images, labels = load_data(data, None, train=True)[:_EXAMPLES]
    survey = Survey()
    with survey, blamed_on_model(model, lambda: "in a training step"):
        network = find_factory(model)()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return survey
