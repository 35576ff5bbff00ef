"""A hundred updates that differ by rounding only: it grows, and is no alarm."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.comparison import compare
from evenstep.comparison.finding import HARMLESS, Cause

UPDATES, EXAMPLES = 100, 32


class Texts(nn.Module):
    """Takes tokens, and gives classes of texts."""

    def __init__(self, layer):
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(30, 16), layer, nn.Linear(16, 4)

    def forward(self, x):
        out = self.layer(self.words(x))
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


MODELS = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)),
    "smooth": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    ),
    "recurrent": lambda: Texts(nn.LSTM(16, 16, batch_first=True)),
    "attention": lambda: Texts(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)),
    "residual": lambda: Texts(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())),
}  # fmt: skip
OPTIMIZERS = {
    "momentum": lambda held: torch.optim.SGD(held, 0.1, momentum=0.9),
    "Adam": lambda held: torch.optim.Adam(held, 0.01),
    "AdamW": lambda held: torch.optim.AdamW(held, 0.01, amsgrad=True),
    "RMSprop": lambda held: torch.optim.RMSprop(held, 0.003),
    "Adagrad": lambda held: torch.optim.Adagrad(held, 0.05),
}


def train(model, optimizer, parts, clip):
    """Train in plain torch; each batch is computed in some parts."""
    torch.manual_seed(1)
    net = MODELS[model]()
    has_words = isinstance(net, Texts)
    data = torch.randint(30, (8 * EXAMPLES, 9)) if has_words else torch.randn(8 * EXAMPLES, 1, 8, 8)
    targets = torch.randint(4, (len(data),))
    updater = OPTIMIZERS[optimizer](net.parameters())
    for update in range(UPDATES):
        some = slice(update % 8 * EXAMPLES, (update % 8 + 1) * EXAMPLES)
        updater.zero_grad()
        for x, y in zip(data[some].chunk(parts), targets[some].chunk(parts), strict=True):
            (F.cross_entropy(net(x), y) / parts).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        updater.step()


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_rounding_that_grows_is_no_alarm(tmp_path, model, optimizer, clip):
    for parts in (1, 2):
        with evenstep.record(tmp_path / f"{parts}.rec", steps=UPDATES):
            train(model, optimizer, parts, clip)
    finding = compare(tmp_path / "1.rec", tmp_path / "2.rec")
    assert finding.cause in HARMLESS, finding


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_rate_that_changes_after_fifty_updates_is_found(tmp_path, model, monkeypatch):
    """The twin of the above: the same growth, with a fault in it."""
    seen = []

    def scheduled(held):
        updater = torch.optim.SGD(held, 0.1, momentum=0.9)
        factor = 0.5 if seen else 1.0
        schedule = torch.optim.lr_scheduler.LambdaLR(updater, lambda n: factor if n >= 50 else 1)
        updater.register_step_post_hook(lambda *_: schedule.step())
        seen.append(updater)
        return updater

    monkeypatch.setitem(OPTIMIZERS, "scheduled", scheduled)
    for parts in (1, 2):
        with evenstep.record(tmp_path / f"{parts}.rec", steps=UPDATES):
            train(model, "scheduled", parts, clip=False)
    finding = compare(tmp_path / "1.rec", tmp_path / "2.rec")
    assert (finding.cause.name, finding.step) == ("SETTINGS", 50), finding


class RoundsBySize(nn.Module):
    """Gives outputs by example, and a state whose examples lie along its second dimension."""

    def forward(self, x):
        out = x.tanh()
        if len(x) > EXAMPLES // 2:
            out = out * (1 + 2**-23)
        return out, out[None]


def test_rounding_is_seen_beside_outputs_that_cant_be_joined(tmp_path):
    """As of recurrent layers on some processors."""
    for parts in (1, 2):
        torch.manual_seed(0)
        net = Texts(RoundsBySize())
        x, targets = torch.randint(30, (EXAMPLES, 9)), torch.randint(4, (EXAMPLES,))
        updater = torch.optim.SGD(net.parameters(), 0.1)
        with evenstep.record(tmp_path / f"{parts}.rec", steps=1):
            for some, y in zip(x.chunk(parts), targets.chunk(parts), strict=True):
                (F.cross_entropy(net(some), y) / parts).backward()
            updater.step()
    finding = compare(tmp_path / "1.rec", tmp_path / "2.rec")
    assert (finding.cause, finding.place) == (Cause.ROUNDING, "layer"), finding
    (seen, *_) = finding.evidence
    assert "relative difference about" in seen
