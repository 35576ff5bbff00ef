"""Trains models with their optimizer split by owners, and writes what came of it.

    torchrun --nproc-per-node 2 tests/support/jobs/owned.py OUT partition CASE ...

OUT is a folder for each rank's results; `whole` instead of `partition` leaves the optimizer whole.
The cases are names of functions below with their arguments, such as `models:2`, `saved:FOLDER`.
"""

import functools
import gc
import json
import os
import re
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.checkpoint.fingerprint import tree_digest
from evenstep.distributed.machines import reduce
from evenstep.errors import ClosedError
from evenstep.steps.owners import reducer as owner_reducer
from grouping import grouped
from owned_optimizers import OPTIMIZERS, model_of
from zoo import ZOO, build, make_batches, options_of

reduce.BUCKET_BYTES = owner_reducer.BUCKET_BYTES = 200
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
BATCHES = make_batches((33, 16, 24))


def trained(model, make, batches=BATCHES, **options):
    optimizer = make(model.parameters())
    options = {"devices": 1, **options_of(model), **options}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = [float(loss) for loss in [trainer.step(X, y) for X, y in batches]]
        return [trainer.fingerprint(), trainer.fingerprint(2), losses]


def optimizers(options):
    """Every optimizer on a model that it takes."""
    return {name: trained(model_of(name), make, **options) for name, make in OPTIMIZERS.items()}


def models(options, in_flight):
    """Every model."""
    return {
        name: trained(build(name), ADAM, max_in_flight=int(in_flight), **options) for name in ZOO
    }


def clipped(options):
    """Norms and bits with `clip_norm`, also of parameters of several dtypes."""
    found = {}
    for name in ("convolution", "mixed_dtypes"):
        model = build(name)
        optimizer = ADAM(model.parameters())
        given = {"devices": 1, "clip_norm": 0.05, **options_of(model), **options}
        with evenstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), **grouped(**given)
        ) as trainer:
            losses = [trainer.step(X, y) for X, y in BATCHES]
            norms = [loss.outputs["grad_norm"] for loss in losses]
            found[name] = [trainer.fingerprint(), norms]
    return found


def in_groups(options):
    """Groups with settings of their own, a scheduler, a frozen parameter that thaws, EMA."""
    model = build("convolution")
    first, *rest = model.parameters()
    first.requires_grad_(False)
    groups = [{"params": [first], "lr": 0.1}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    seen = []

    def before_update(module):
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    given = {"before_update": before_update, "devices": 1, **options}
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), **grouped(scheduler=scheduler, **given)
    ) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
            scheduler.step()
            trainer.waitall()
            first.requires_grad_(True)
            seen.append(trainer.fingerprint(2))
    return seen


def gathered(options):
    """The optimizer's state dict, in the middle of a training."""
    found = {}
    for name in ("Adam", "ScheduleFree", "Adagrad"):
        model = model_of(name)
        optimizer = OPTIMIZERS[name](model.parameters())
        with evenstep.Trainer(
            model,
            optimizer,
            nn.CrossEntropyLoss(),
            **grouped(devices=1, max_in_flight=2, **options),
        ) as trainer:
            for X, y in BATCHES:
                trainer.step(X, y)
            if not options:
                trainer.waitall()  # which the gathering does by itself
            state = optimizer.state_dict()
            digest = tree_digest(state)
            held = sum(1 for parameter in model.parameters() if parameter in optimizer.state)
            for X, y in BATCHES:
                trainer.step(X, y)
            found[name] = [digest, [*state["state"]], trainer.fingerprint()]
            whole = len([*model.parameters()])
            assert (held < whole) == bool(options), (held, whole)
        if options:
            with pytest.raises(ClosedError, match="split over processes"):
                optimizer.state_dict()
            with pytest.raises(ClosedError, match="can be opened once"):
                trainer.open()
    return found


def saved(options, folder):
    """Save in the middle of a training, then end it."""
    model = build("convolution")
    optimizer = ADAM(model.parameters())
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), **grouped(devices=1, **options)
    ) as trainer:
        for X, y in BATCHES[:2]:
            trainer.step(X, y)
        trainer.save(folder)
        trainer.step(*BATCHES[2])
        return trainer.fingerprint(2)


def resumed(options, folder):
    """End a training that was saved, and save it again."""
    model = build("convolution", seed=1)
    optimizer = ADAM(model.parameters())
    with evenstep.Trainer.load(
        folder, model, optimizer, nn.CrossEntropyLoss(), **grouped(devices=1, **options)
    ) as trainer:
        opened = trainer.fingerprint(2)
        trainer.step(*BATCHES[2])
        return [opened, trainer.fingerprint(2)]


def two_steps(options):
    """The fingerprint after two steps of Adam with torch's settings."""
    return trained(build("convolution"), torch.optim.Adam, BATCHES[:2], **options)[0]


def killed(options, folder, at):
    """Train, and save each step; go on from the last one that was saved; be killed in one."""
    model = build("convolution")
    optimizer = ADAM(model.parameters())

    def before_update(module):
        is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        if is_last and trainer.steps_done == int(at):
            os.kill(os.getpid(), signal.SIGKILL)

    given = {"devices": 1, "before_update": before_update, **options}
    make = functools.partial(evenstep.Trainer.load, folder)
    make = make if Path(folder).exists() else evenstep.Trainer
    with make(model, optimizer, nn.CrossEntropyLoss(), **grouped(**given)) as trainer:
        for X, y in make_batches((33, 16, 24) * 3)[trainer.steps_done :]:
            trainer.step(X, y)
            trainer.save(folder)
        return trainer.fingerprint(2)


def memory(options):
    """Bytes of a transformer at rest, for each parameter: all tensors that a step leaves."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0, batch_first=True)
    model = nn.Sequential(
        nn.Flatten(1, 2), nn.Linear(6, 32), nn.TransformerEncoder(layer, 12), nn.Flatten(),
        nn.Linear(6 * 32, 5),
    )  # fmt: skip
    optimizer = ADAM(model.parameters())
    gc.collect()
    known = {id(one) for one in gc.get_objects() if isinstance(one, torch.Tensor)}
    known -= {id(one) for one in model.parameters()}
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), **grouped(devices=1, **options)
    ) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
        gc.collect()
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
        new = [one for one in tensors if id(one) not in known]
        new += [one.grad for one in new if one.is_leaf and one.grad is not None]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in new}
        nbytes = sum(storage.nbytes() for storage in storages.values())
        return [nbytes / sum(map(torch.Tensor.numel, model.parameters()))]


def limited(options, *more):
    """Train where parameters, gradients and state need 1.5 times what they may; say whether it did.

    The limit is for what the process has besides its libraries and threads.
    """
    torch.manual_seed(0)
    width = 1000
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, width),
                          *(nn.Linear(width, width) for _ in range(160)))  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    given = {"shards": 2, "devices": 1, "check": "off", "tune_malloc": False, **options}
    given["peer_timeout_s"] = 60
    if "stages" in more:
        division = (evenstep.Stages("balanced"), *filter(None, [given.get("divide")]))
        given |= {"devices": 2, "divide": division}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**given)) as trainer:
        numbers = sum(map(torch.Tensor.numel, model.parameters()))
        status = Path("/proc/self/status").read_text()
        used = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024 - 4 * numbers
        limit = used + int(16 * numbers / 1.5)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        losses = [float(trainer.step(*make_batches((8,))[0])) for _ in range(3)]
    return [one == one for one in losses]


def main():
    out, splits, cases = Path(sys.argv[1]), sys.argv[2] == "partition", sys.argv[3:]
    options = {"divide": evenstep.Owners()} if splits else {}
    calls = {case: case.split(":") for case in cases}
    found = {case: globals()[name](options, *given) for case, (name, *given) in calls.items()}
    (out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
