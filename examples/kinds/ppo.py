"""PPO: 16 agents walk in corridors of rooms 0 to 8; the right end gives a reward."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep

AGENTS, TURNS = 16, 8


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, seen):
        hidden = self.body(seen)
        return self.actor(hidden), self.critic(hidden)[:, 0]


def walk(ask, rooms):
    """Let the agents take some turns; return the rooms, and what PPO learns from."""
    told = []
    for _ in range(TURNS):
        seen = F.one_hot(rooms, 9).float()
        scores, values = ask(seen)
        actions = scores.softmax(1).multinomial(1)[:, 0]
        rooms = rooms + 2 * actions - 1
        ends, rewards = rooms % 8 == 0, (rooms == 8).float()
        rooms = rooms.masked_fill(ends, 4)
        chosen = scores.log_softmax(1).gather(1, actions[:, None])[:, 0]
        told.append((seen, actions, chosen, values, rewards, ends))
    following, gain, gains = ask(F.one_hot(rooms, 9).float())[1], torch.zeros(AGENTS), []
    for _, _, _, values, rewards, ends in reversed(told):  # generalized advantage estimation
        gain = rewards + 0.9 * following * ~ends - values + 0.9 * 0.95 * gain * ~ends
        following, gains = values, [gain, *gains]
    seen, actions, chosen, values, _, _ = (torch.cat(one) for one in zip(*told, strict=True))
    gains = torch.cat(gains)
    return rooms, (seen, actions, chosen, gains / gains.std(), gains + values)


def clipped(model, seen, actions, before, gains, returns):
    scores, values = model(seen)
    chosen = scores.log_softmax(1).gather(1, actions[:, None])[:, 0]
    ratio = (chosen - before).exp()
    won = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains)
    return (0.5 * (values - returns).square() - won).mean()


def plain(steps=6):
    torch.manual_seed(0)
    model, rooms, losses = ActorCritic(), torch.full((AGENTS,), 4), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        with torch.no_grad():
            rooms, batch = walk(model, rooms)
        for _ in range(3):
            optimizer.zero_grad()
            loss = clipped(model, *batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, rooms, losses = ActorCritic(), torch.full((AGENTS,), 4), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    clip = evenstep.Experiment(clip_norm=0.5)
    options = {"devices": devices, "shards": shards, "experiment": clip}
    with evenstep.Trainer(model, optimizer, objective=clipped, **options) as trainer:
        for _ in range(steps):
            rooms, batch = walk(lambda seen: trainer.predict([seen]), rooms)
            for _ in range(3):
                loss = trainer.step(*batch)
                losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
