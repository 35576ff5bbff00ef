"""`evenstep export`: writes a trained model as one file that runs without its Python source."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from evenstep.checkpoint.files import list_checkpoints
from evenstep.checkpoint.restore import restore_model
from evenstep.checkpoint.training_state import read_training_state
from evenstep.cli.terminal.files import target_of
from evenstep.cli.terminal.output import fields_table, print_table
from evenstep.cli.training.runfile import read_run_file
from evenstep.cli.training.setup import load_data, seeded_model
from evenstep.files import sha256_of
from evenstep.inference.export import export as write_program
from evenstep.inference.export import load_exported
from evenstep.models.registry import find_factory
from evenstep.shard.evaluation import evaluation_mode

_COMPARED = 64  # examples


def export(checkpoint: Path, out: str) -> None:
    """Write the model of a checkpoint to the file `out`, and compare the outputs."""
    file = target_of(out)
    saved = read_training_state(checkpoint)
    options = read_run_file(checkpoint if list_checkpoints(checkpoint) else checkpoint.parent)
    model = seeded_model(find_factory(options["model"]), saved.experiment)
    restore_model(model, saved.model)
    examples = load_data(options["data"], options["data_dir"], train=False).tensors[0][:_COMPARED]
    write_program(model, examples, file)
    fields = [("file", out), ("sha256", sha256_of(file)), ("step", str(saved.steps_done))]
    if file.suffix == ".onnx":
        fields.append(("compared", f"in onnxruntime, on {len(examples)} test examples"))
    else:
        exported = load_exported(file)
        with evaluation_mode(model), torch.no_grad():
            difference = (exported(examples) - model(examples)).abs().max().item()
        fields.append(("input", ", ".join(map(str, exported.inputs))))
        fields.append(("max difference", f"{difference:.1e} on {len(examples)} test examples"))
    print_table(Console(), fields_table(fields))
