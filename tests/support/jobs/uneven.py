"""A script whose second process is slow: this one's shards in each epoch, and the fingerprint."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.data import Loader
from zoo import build, make_batches

EPOCHS, BATCHES, SHARDS = 5, 40, 8


def main():
    """Train, and write what this process did."""
    out, rank = Path(sys.argv[1]), int(os.environ.get("RANK", "0"))
    model, computed = build("convolution"), []
    (examples,) = make_batches([BATCHES * 16])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=1, shards=SHARDS, max_in_flight=2
    ) as trainer:
        trainer.on_shard = lambda shard, value: computed.append(shard)
        if rank == 1:
            model.register_forward_pre_hook(lambda module, inputs: time.sleep(0.003))
        loader = Loader(TensorDataset(*examples), 16, seed=3)
        counts = []
        for _ in range(EPOCHS):
            for batch in trainer.epoch(loader):
                trainer.step(*batch)
            trainer.waitall()
            counts.append(len(computed))
            computed.clear()
        told = {"counts": counts, "fingerprint": trainer.fingerprint()}
    (out / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
