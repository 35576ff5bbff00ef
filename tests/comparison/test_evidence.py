"""Small loops that differ in one thing: evidence and remedy say which, and nothing false."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import evenstep
from evenstep.comparison import Cause, compare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """What a loop does otherwise than the plain one."""

    left_out: tuple[int, ...] = ()
    flipped: float = 0.0
    noise: float = 0.0
    is_shuffled: bool = True
    drop_last: bool = False
    reduction: str = "mean"
    undecayed: tuple[str, ...] = ()
    momentum: float = 0.1
    running_mean: float = 0.0
    clips_parts: bool | None = None


class Images:
    """22 images, of which some may be flipped when they are read, or get noise."""

    def __init__(self, loop):
        every = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
        self.loop = loop
        self.images = [one for number, one in enumerate(every) if number not in loop.left_out]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image, loop = self.images[number], self.loop
        if loop.flipped and torch.rand(()) < loop.flipped:
            image = image.flip(0)
        return image + loop.noise * torch.randn(4) if loop.noise else image


def train(loop):
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=loop.momentum), nn.Linear(4, 3)
    )
    model[1].running_mean += loop.running_mean
    held = dict(model.named_parameters())
    groups = [{"params": [one for name, one in held.items() if name not in loop.undecayed]}]
    if loop.undecayed:
        groups.append({"params": [held[name] for name in loop.undecayed], "weight_decay": 0.0})
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.1)
    batches = DataLoader(
        Images(loop), 6, shuffle=loop.is_shuffled, drop_last=loop.drop_last,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    torch.manual_seed(4)
    for _ in range(3):
        for x in batches:
            optimizer.zero_grad()
            for part in x.chunk(1 if loop.clips_parts is None else 2):
                targets = (part.sum(1) > 0).long()
                F.cross_entropy(model(part), targets, reduction=loop.reduction).backward()
                if loop.clips_parts:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


def found(tmp_path, **loops):
    for name, loop in loops.items():
        with evenstep.record(tmp_path / name):
            train(loop)
    finding = compare(*(tmp_path / name for name in loops))
    return finding, " ".join((*finding.evidence, finding.remedy))


PAIRS = [
    (Loop(), Loop(flipped=0.2), Cause.DATA, "augmentation"),
    (Loop(flipped=0.3), Loop(flipped=0.4), Cause.DATA, "augmentation"),
    (Loop(is_shuffled=False), Loop(is_shuffled=False, noise=0.1), Cause.DATA, "augmentation"),
    (Loop(), Loop(left_out=(5,)), Cause.DATA, "draw from 22 examples"),
    (
        Loop(is_shuffled=False),
        Loop(is_shuffled=False, left_out=(20, 21)),
        Cause.DATA,
        "draw from 22 examples",
    ),
    (Loop(), Loop(drop_last=True), Cause.DROPPED, "other has no update for the last examples"),
    (Loop(), Loop(reduction="sum"), Cause.LOSS, "one is a sum over the examples"),
    (Loop(), Loop(undecayed=("0.bias", "2.bias")), Cause.SETTINGS, "weight_decay of 0.bias is 0.1"),
    (
        Loop(undecayed=("0.bias",)),
        Loop(undecayed=("2.bias",)),
        Cause.SETTINGS,
        "weight_decay of 2.bias is 0.1",
    ),
    (Loop(), Loop(momentum=0.2), Cause.LAYER, "momentum=0.2"),
    (Loop(), Loop(running_mean=1.0), Cause.BUFFERS, "and before the first one"),
    (Loop(clips_parts=False), Loop(clips_parts=True), Cause.GRADIENTS, "between two backward"),
]


@pytest.mark.parametrize(("one", "other", "cause", "line"), PAIRS, ids=str)
def test_the_true_cause_is_named(tmp_path, one, other, cause, line):
    finding, text = found(tmp_path, one=one, other=other)
    assert finding.cause is cause, finding
    assert line in text, finding
    again = compare(tmp_path / "other", tmp_path / "one")
    assert again.cause is cause, again


def test_another_order_is_still_one(tmp_path):
    finding, _ = found(tmp_path, one=Loop(), other=Loop(is_shuffled=False))
    assert finding.cause in (Cause.ORDER, Cause.SAME_ORDER), finding


def test_parameters_in_other_groups_with_the_same_settings_are_equal(tmp_path):
    finding, _ = found(tmp_path, one=Loop(undecayed=("2.bias",)), other=Loop(undecayed=("2.bias",)))
    assert finding.cause is Cause.NOTHING, finding
