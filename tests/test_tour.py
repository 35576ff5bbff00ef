"""A tour of evenstep: the README in code. Read this first."""

import functools

import torch
from torch import nn

import evenstep
from evenstep.data import Loader, digits


def small_net():
    torch.manual_seed(0)
    return evenstep.models.mlp(hidden=(32,))


def train(devices, *, shards=8, steps=4):
    """Train on a slice of the real digits and return (the model, its trainer's fingerprint)."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = Loader(digits(), batch_size=64, seed=0)
    with evenstep.Trainer(
        model, optimizer, loss=nn.CrossEntropyLoss(), devices=devices, shards=shards, seed=0
    ) as trainer:
        for X, y in trainer.epoch(batches):
            loss = trainer.step(X, y)  # a handle; float(loss) is the mean loss
            if trainer.steps_done == steps:
                break
        assert float(loss) > 0
        return model, trainer.fingerprint()


def test_the_result_does_not_depend_on_the_number_of_devices():
    _, one = train(1)
    _, two = train(["cpu:0", "cpu:1"])
    _, like_gpus = train(["cpu:0:own", "cpu:1:own", "cpu:2:own"])  # memory of their own
    assert one == two == like_gpus


def test_the_number_of_shards_belongs_to_the_experiment():
    _, eight = train(2, shards=8)
    _, four = train(2, shards=4)
    assert eight != four


def test_one_shard_is_the_plain_pytorch_loop():
    model, _ = train(1, shards=1, steps=3)
    plain = small_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    batches = iter(Loader(digits(), batch_size=64, seed=0))
    for _ in range(3):
        X, y = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(X), y).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_stop_here_and_go_on_elsewhere(tmp_path):
    def fresh():
        model = small_net()
        return model, torch.optim.Adam(model.parameters(), lr=0.01), nn.CrossEntropyLoss()

    def run(trainer, until):
        with trainer:
            while trainer.steps_done < until:
                for X, y in trainer.epoch(Loader(digits(), batch_size=500, seed=1)):
                    trainer.step(X, y)
                    if trainer.steps_done == until:
                        break
        return trainer

    unbroken = run(evenstep.Trainer(*fresh(), devices=1), until=5)
    first = run(evenstep.Trainer(*fresh(), devices=2), until=2)  # in the middle of an epoch
    first.save(tmp_path)
    resumed = run(evenstep.Trainer.load(tmp_path, *fresh(), devices=3), until=5)
    assert resumed.fingerprint() == unbroken.fingerprint()


def test_clipping_and_schedulers_are_torchs_own():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.5)
    with evenstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        devices=2,
        before_update=lambda module: clip(module.parameters()),
        scheduler=scheduler,
    ) as trainer:
        X, y = next(iter(Loader(digits(), batch_size=64)))
        trainer.step(X, y)
        scheduler.step()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert norm <= 0.5001
        assert optimizer.param_groups[0]["lr"] < 0.1


def test_an_objective_weighs_by_its_own_count():
    """A loss over the examples that a mask counts; empty shards and masks cost nothing."""

    def objective(model, batch):
        losses = nn.functional.cross_entropy(model(batch["X"]), batch["y"], reduction="none")
        return (losses * batch["mask"]).sum(), batch["mask"].sum()

    X, y = digits().tensors
    batch = {"X": X[:50], "y": y[:50], "mask": (torch.arange(50) % 3 > 0).float()}
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(model, optimizer, objective=objective, devices=2) as trainer:
        loss = float(trainer.step(batch))
    counted = batch["mask"].bool()
    plain = nn.functional.cross_entropy(small_net()(X[:50][counted]), y[:50][counted])
    torch.testing.assert_close(torch.tensor(loss), plain.detach(), rtol=1e-5, atol=0)


def test_evaluation_counts_every_example_once():
    model, _ = train(1, steps=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    test_batches = Loader(digits(train=False), batch_size=100, shuffle=False)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=2) as trainer:
        measured = trainer.evaluate(test_batches, {"accuracy": evenstep.metrics.accuracy})
    X, y = digits(train=False).tensors
    assert measured["accuracy"] == (model(X).argmax(1) == y).sum().item() / len(y)


def test_steps_in_flight_have_the_same_bits():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenstep.Trainer(
        model, optimizer, loss=nn.CrossEntropyLoss(), devices=2, max_in_flight=2
    ) as trainer:
        batches = trainer.epoch(Loader(digits(), batch_size=64))
        losses = [trainer.step(*batch) for _, batch in zip(range(4), batches, strict=False)]
        assert all(float(loss) > 0 for loss in losses)
        assert trainer.fingerprint() == train(1)[1]


def test_the_engine_alone(tmp_path):
    x = torch.eye(3)
    with evenstep.Engine(devices=["cpu:0", "cpu:1"]) as engine:
        y = engine.submit(torch.mm, x, x)
        z = engine.submit(torch.add, y, 2, device="cpu:1")
        total = engine.Var(torch.zeros_like(x))
        engine.submit(torch.Tensor.add_, total, z, writes=[total])
        assert torch.equal(total.result(), x + 2)
        engine.trace.save(tmp_path / "timeline.json")
