"""DPO: a language model learns to prefer one answer to another, compared with a frozen copy."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class Writer(nn.Module):
    """Returns the log-probability of each sequence."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.cell = nn.GRU(16, 16, batch_first=True)

    def forward(self, tokens):
        scores = self.head(self.cell(self.embed(tokens[:, :-1]))[0])
        return -F.cross_entropy(scores.mT, tokens[:, 1:], reduction="none").sum(1)


def loss_of(model, chosen, rejected, reference):
    margin = model(chosen) - model(rejected)
    return -F.logsigmoid(0.1 * (margin - reference)).mean()


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(10, (32, 8), generator=random)
        yield chosen, torch.randint(10, 20, (32, 8), generator=random)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Writer(), []
    frozen = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for chosen, rejected in batches(steps):
        with torch.no_grad():
            reference = frozen(chosen) - frozen(rejected)
        optimizer.zero_grad()
        loss = loss_of(model, chosen, rejected, reference)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = Writer(), []
    frozen = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, objective=loss_of, **options) as trainer:
        for chosen, rejected in batches(steps):
            known = [trainer.predict([one], model=frozen) for one in (chosen, rejected)]
            loss = trainer.step(chosen, rejected, known[0] - known[1])
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
