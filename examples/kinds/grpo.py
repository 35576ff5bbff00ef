"""GRPO: a model writes groups of answers, and learns from those that beat their group's mean."""

import copy

import torch
from torch import nn

import evenstep

PROMPTS, GROUP, LENGTH = 4, 8, 5


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 16), nn.Linear(16, 10)
        self.cell = nn.GRU(16, 16, batch_first=True)

    def forward(self, tokens):
        return self.head(self.cell(self.embed(tokens))[0])


def chances(scores, tokens):
    """Return the log-probabilities of the tokens behind the first."""
    return scores[:, :-1].log_softmax(2).gather(2, tokens[:, 1:, None])[:, :, 0]


def answers(ask, prompts):
    tokens = prompts.repeat_interleave(GROUP)[:, None]
    for _ in range(LENGTH):
        following = ask(tokens)[:, -1].softmax(1).multinomial(1)
        tokens = torch.cat([tokens, following], 1)
    return tokens


def advantages(tokens):
    rewards = (tokens[:, 1:] == tokens[:, :1]).float().mean(1).view(PROMPTS, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def loss_of(model, tokens, gains, before, reference):
    now = chances(model(tokens), tokens)
    ratio, away = (now - before).exp(), reference - now
    won = torch.min(ratio * gains[:, None], ratio.clamp(0.8, 1.2) * gains[:, None])
    return (0.04 * (away.exp() - away - 1) - won).mean()


def plain(steps=4):
    torch.manual_seed(0)
    model, losses = Writer(), []
    frozen, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        with torch.no_grad():
            tokens = answers(model, torch.randint(10, (PROMPTS,)))
            before, reference = (chances(one(tokens), tokens) for one in (model, frozen))
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, tokens, advantages(tokens), before, reference)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=4):
    torch.manual_seed(0)
    model, losses = Writer(), []
    frozen, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, objective=loss_of, **options) as trainer:
        for _ in range(steps):
            tokens = answers(
                lambda so_far: trainer.predict([so_far]), torch.randint(10, (PROMPTS,))
            )
            known = [trainer.predict([tokens], model=one) for one in (model, frozen)]
            before, reference = (chances(one, tokens) for one in known)
            for _ in range(2):
                loss = trainer.step(tokens, advantages(tokens), before, reference)
                losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
