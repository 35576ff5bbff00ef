"""A checkpoint of a training, written without one."""

from pathlib import Path

import torch
from test_codec import DTYPES, random_tensor

from evenstep.checkpoint import files
from evenstep.checkpoint.codec import encode

TREE = {
    "experiment": {"shards": 8, "seed": 0, "precision": "fp32"},
    "cursor": {"epoch": 1, "step": 40, "loss": float("nan")},
    "model": {f"{dtype}": random_tensor(dtype, 2, 3) for dtype in DTYPES},
    "optimizer": {"state": {0: {"step": torch.tensor(40.0)}}, "betas": (0.9, 0.999)},
    "scheduler": None,
}
FILES = ["manifest.json", "tensors.safetensors"]


def write_checkpoint(folder, tree, **options):
    return files.write_checkpoint(folder, encode(tree), **options)


def names(folder):
    return sorted(entry.name for entry in Path(folder).iterdir())
