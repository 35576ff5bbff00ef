"""`evenstep export`: a trained model as one file that runs without its Python source."""

from __future__ import annotations

from pathlib import Path

import click
import torch
from rich.console import Console

from evenstep.checkpoint.files import list_checkpoints
from evenstep.checkpoint.training_state import read_training_state, restore_model
from evenstep.cli.display import print_table
from evenstep.cli.runfile import saved_choices
from evenstep.cli.setup import load_data
from evenstep.inference.export import export as write_program
from evenstep.inference.export import load_exported
from evenstep.models.registry import find_factory
from evenstep.shard.evaluation import evaluation_mode

_COMPARED = 64  # examples


@click.command()
@click.option(
    "--checkpoint",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder of a run (its newest checkpoint counts), or one checkpoint in it.",
)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file to write: .pt2 for evenstep.load_exported, or .onnx.",
)
def export(checkpoint: Path, out: Path) -> None:
    """Write the model of a checkpoint into one file that runs without its Python source.

    What the file computes is compared with the model, on examples of the run's test data.
    """
    saved = read_training_state(checkpoint)
    choices = saved_choices(checkpoint if list_checkpoints(checkpoint) else checkpoint.parent)
    model = find_factory(choices["model"])()
    restore_model(model, saved.model)
    examples = load_data(choices["data"], choices["data_dir"], train=False).tensors[0][:_COMPARED]
    write_program(model, examples, out)
    rows = [("file", str(out)), ("step", str(saved.steps_done))]
    if out.suffix == ".onnx":
        rows.append(("compared", f"in onnxruntime, on {len(examples)} test examples"))
    else:
        exported = load_exported(out)
        with evaluation_mode(model), torch.no_grad():
            difference = (exported(examples) - model(examples)).abs().max().item()
        rows.append(("input", ", ".join(map(str, exported.inputs))))
        rows.append(("max difference", f"{difference:.1e} on {len(examples)} test examples"))
    print_table(Console(), rows)
