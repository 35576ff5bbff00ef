"""A script that trains on emulated accelerators with a model of several buckets of gradients.

    python tests/support/jobs/backends.py OUT MODE DEVICES BACKEND

BACKEND is "emuccl"; "none" where torch.distributed has no backend for them; "lacking" where one of
its collectives is missing; "swapping" where it gives chunks to wrong ranks; "killed" where rank 1
is lost when its gradients are on the way. Each process writes to OUT.RANK its fingerprint, and what
each step has moved between processes, copied between the device and the host, and waited for.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import emu
import emu.backend
import evenstep
from evenstep.distributed.accelerators import reduce
from evenstep.distributed.gradient_reduce import GradientReduction
from launched import meet

out, mode, devices, backend = sys.argv[1:]
RANK = int(os.environ.get("RANK", "0"))
EARLY = []  # buckets that were exchanged before the backward pass had ended


class Lacking(emu.backend.Backend):
    def allgather(self, outs, given, opts=None):
        raise RuntimeError("Backend emuccl does not support allgather")


class Swapping(emu.backend.Backend):
    def alltoall_base(self, out, given, taken, to_each, opts=None):
        return super().alltoall_base(out, given.roll(to_each[0]), taken, to_each)


def killed(self):
    os.kill(os.getpid(), signal.SIGKILL)


def noting(self, partials, write_rest=GradientReduction.write_rest):
    EARLY.append(emu.backend.MOVED["all_to_all calls"])
    write_rest(self, partials)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 1200), nn.ReLU(), nn.Linear(1200, 1200), nn.Tanh(), nn.Linear(1200, 3)
    )


def main():
    emu.load(Path(__file__).parents[3] / "build")
    emu.configure(mode)
    makers = {"lacking": Lacking, "swapping": Swapping}
    if backend != "none":
        emu.backend.register(makers.get(backend, emu.backend.Backend))
    GradientReduction.write_rest = noting
    meet()
    model = make_model()
    found = {"waits": [], "copies": [], "moved": []}
    faults = evenstep.Faults(peer_timeout_s=10.0) if backend == "killed" else evenstep.Faults()
    with evenstep.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        nn.CrossEntropyLoss(),
        devices=devices,
        shards=4,
        faults=faults,
    ) as trainer:
        for step in range(4):
            given = torch.Generator().manual_seed(step)
            X, y = torch.randn(13, 6, generator=given), torch.arange(13) % 3
            if backend == "killed" and RANK == 1 and step == 2:
                reduce._BackendReduction.total = killed
            emu.host_waits(), emu.host_copies(), emu.backend.MOVED.clear()
            float(trainer.step(X, y))
            found["waits"].append(emu.host_waits())
            found["copies"].append(emu.host_copies())
            found["moved"].append(dict(emu.backend.MOVED))
        found["fingerprint"] = trainer.fingerprint()
    found["early"] = EARLY
    found["nbytes"] = sum(one.nbytes for one in model.parameters())
    torch.save(found, f"{out}.{RANK}")


main()
