"""A script one of whose processes does what the argument says in step 3; what the others see."""

import contextlib
import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.data import Loader
from evenstep.distributed.machines import reduce
from evenstep.errors import EvenstepError
from grouping import grouped
from launched import meet
from zoo import build, make_batches


def fail(_):
    raise RuntimeError("rank 1 has a problem of its own")


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


class Failing(torch.optim.SGD):
    """Fails, when it is told to, behind the update of the parameters."""

    fails = False

    def step(self, closure=None):
        super().step()
        if self.fails:
            self.fails = False
            fail(self)


LATE = {"raise in backward": fail, "die in backward": die}


def hook_output(function, module, inputs, output):
    """Call `function` late in the backward pass: the module is the model's first layer."""
    output.register_hook(function)


def trouble(kind, model, batch):
    """Do what goes wrong in rank 1."""
    if kind == "raise":
        raise RuntimeError("rank 1 has a problem of its own")
    if kind == "bad batch":
        return batch[0][:0], batch[1][:0]
    if kind in LATE:
        model[0].register_forward_hook(functools.partial(hook_output, LATE[kind]))
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "flipped bit":
        with torch.no_grad():
            next(model.parameters()).view(-1).view(torch.int32)[3] ^= 1
    if kind == "other batch":
        return batch[0][:20], batch[1][:20]
    return batch


def main():
    """Train; write what ended it."""
    out, kind, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    if "in buckets" in sys.argv[3:]:  # which leave while a backward pass still runs
        reduce.BUCKET_BYTES = 200
        reduce.SharedMemoryReducer = reduce.NetworkReducer
    model = build("convolution", seed=rank if kind == "other model" else 0)
    optimizer = Failing(model.parameters(), lr=0.1)
    if kind != "nothing":  # then this process is alone
        meet()
    began = time.monotonic()
    try:
        with evenstep.Trainer(
            model,
            optimizer,
            nn.CrossEntropyLoss(),
            **grouped(devices=1, peer_timeout_s=3.0, check_every=5, check="off"),
        ) as trainer:
            if kind == "other data":
                X = torch.full((64, 1, 6, 6), float(rank))
                next(iter(trainer.epoch(Loader(TensorDataset(X, torch.zeros(64).long()), 32))))
            for step, batch in enumerate(make_batches([32] * 6)):
                own = trouble(kind, model, batch) if (rank, step) == (1, 3) else batch
                if kind == "optimizer" and (rank, step) == (1, 3):
                    optimizer.fails = True
                    with contextlib.suppress(RuntimeError):  # and goes on as if nothing was
                        trainer.step(*own)
                    continue
                trainer.step(*own)
                if kind == "cut cable" and step == 3:
                    (out / "cut").touch()
                    time.sleep(2)
        told = "nothing"
    except (EvenstepError, RuntimeError) as error:
        if "uncaught" in sys.argv[3:]:
            raise
        told = f"{type(error).__name__}: {error}"
    (out / f"{rank}.txt").write_text(f"{time.monotonic() - began}\n{told}")


if __name__ == "__main__":
    main()
