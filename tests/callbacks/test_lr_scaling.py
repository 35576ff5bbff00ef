"""The rules by which a learning rate follows the batch size."""

import pytest
import torch

import evenstep
from evenstep.errors import InputError
from zoo import build, make_batches


def optimizer_of(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def rates(scheduler, optimizer, steps):
    """Return the rate of each step."""
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


FALLING = [0.2, 0.2 * (1 + 0.5**0.5) / 2, 0.1, 0.2 * (1 - 0.5**0.5) / 2, 0.0, 0.0]


@pytest.mark.parametrize(
    ("base", "batch", "options", "expected"),
    [
        (64, 512, {"rule": "linear"}, [0.8] * 3),
        (64, 512, {"rule": "sqrt"}, [0.1 * 8**0.5] * 3),
        (64, 16, {}, [0.025] * 3),
        (1, 5, {"warmup_steps": 4}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),
        (1, 2, {"warmup_steps": 1, "total_steps": 5}, [0.1, *FALLING]),  # half a cosine
    ],
)
def test_the_rate_follows_the_batch_size(base, batch, options, expected):
    optimizer = optimizer_of(build("convolution"))
    sizes = {"base_batch_size": base, "batch_size": batch}
    scheduler = evenstep.scale_lr(optimizer, **sizes, **options)
    assert rates(scheduler, optimizer, len(expected)) == pytest.approx(expected)


def test_each_group_keeps_its_own_base():
    first, second = (build("convolution")[0], build("convolution")[4])
    optimizer = torch.optim.SGD(
        [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.2}]
    )
    evenstep.scale_lr(optimizer, base_batch_size=1, batch_size=2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.4])


def test_it_goes_into_a_checkpoint_and_on(tmp_path):
    def trainer_of(model, folder=None):
        optimizer = optimizer_of(model)
        scheduler = evenstep.scale_lr(optimizer, base_batch_size=8, batch_size=16, warmup_steps=6)
        arguments = (model, optimizer, torch.nn.CrossEntropyLoss())
        options = {"devices": 2, "scheduler": scheduler}
        if folder is None:
            return evenstep.Trainer(*arguments, **options)
        return evenstep.Trainer.load(folder, *arguments, **options)

    def steps(trainer, batches):
        for batch in batches:
            trainer.step(*batch)
            trainer.scheduler.step()

    batches = make_batches([16] * 4)
    with trainer_of(build("convolution")) as whole:
        steps(whole, batches)
    with trainer_of(build("convolution")) as first:
        steps(first, batches[:2])
        first.save(tmp_path)
    with trainer_of(build("convolution"), tmp_path) as second:
        steps(second, batches[2:])
        assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 + 4 / 6))
    assert second.fingerprint() == whole.fingerprint()


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"rule": "cubic"}, "choose one of linear, sqrt"),
        ({"batch_size": 0}, "at least 1, 1 and 0"),
        ({"warmup_steps": -1}, "at least 1, 1 and 0"),
        ({"warmup_steps": 3, "total_steps": 3}, "shorter than the training"),
    ],
)
def test_other_rules_and_sizes_are_refused(wrong, part):
    arguments = {"base_batch_size": 1, "batch_size": 1, **wrong}
    with pytest.raises(InputError, match=part):
        evenstep.scale_lr(optimizer_of(build("convolution")), **arguments)
