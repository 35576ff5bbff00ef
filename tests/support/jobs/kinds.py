"""Runs programs of `examples/kinds` as they stand there, on one device in each process.

torchrun --nproc-per-node 2 tests/support/jobs/kinds.py OUT NAME...

Writes to OUT, for each rank, what the programs have trained, or the error that has refused them.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import kinds
from evenstep.errors import InputError


def trained(name):
    try:
        return kinds.outcome(*kinds.load(name).even(devices=1))
    except InputError as error:
        return str(error)


def main():
    torch.set_num_threads(1)
    found = {name: trained(name) for name in sys.argv[2:]}
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
