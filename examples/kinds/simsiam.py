"""SimSiam: two views of an image, a predictor, and a stopped gradient."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class SimSiam(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
        )
        self.predictor = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))

    def forward(self, view):
        code = self.encoder(view)
        return code, self.predictor(code)


def loss_of(model, one, other):
    (code, guess), (other_code, other_guess) = model(one), model(other)
    alike = F.cosine_similarity(guess, other_code.detach()).mean()
    return -(alike + F.cosine_similarity(other_guess, code.detach()).mean()) / 2


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.randn(64, 32, generator=random)
        yield [images + 0.3 * torch.randn(64, 32, generator=random) for _ in range(2)]


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = SimSiam(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for views in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *views)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = SimSiam(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, objective=loss_of, **options) as trainer:
        for views in batches(steps):
            loss = trainer.step(*views)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
