"""Truncated BPTT: an LSTM reads long texts in pieces, and its state goes from piece to piece."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)

    def forward(self, tokens, state):
        output, state = self.lstm(self.embed(tokens), state)
        return self.head(output), state


def batches(steps):
    random = torch.Generator().manual_seed(0)
    texts = torch.randint(4, (32, 8 * steps + 1), generator=random).cumsum(1) % 20
    for start in range(0, 8 * steps, 8):
        yield texts[:, start : start + 8], texts[:, start + 1 : start + 9]


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Reader(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = torch.zeros(2, 32, 16), torch.zeros(2, 32, 16)  # (layers, texts, features)
    for tokens, following in batches(steps):
        optimizer.zero_grad()
        scores, state = model(tokens, state)
        loss = F.cross_entropy(scores.mT, following)
        loss.backward()
        optimizer.step()
        state = tuple(one.detach() for one in state)
        losses.append(loss.item())
    return model, optimizer, losses


def with_state(model, tokens, following, *state):
    scores, state = model(tokens, tuple(one.transpose(0, 1).contiguous() for one in state))
    hidden, cell = (one.transpose(0, 1) for one in state)
    return F.cross_entropy(scores.mT, following), {"hidden": hidden, "cell": cell}


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = Reader(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = torch.zeros(32, 2, 16), torch.zeros(32, 2, 16)  # a row for each text
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, objective=with_state, **options) as trainer:
        for tokens, following in batches(steps):
            loss = trainer.step(tokens, following, *state)
            state = loss.outputs["hidden"], loss.outputs["cell"]
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
