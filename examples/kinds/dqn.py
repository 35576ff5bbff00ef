"""DQN: a memory of moves, and a network that lags behind for the targets."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


def memory():
    """Return moves in a corridor of rooms 0 to 8, taken at random: (seen, action, reward, next)."""
    random = torch.Generator().manual_seed(0)
    rooms = torch.randint(1, 8, (512,), generator=random)
    actions = torch.randint(2, (512,), generator=random)
    following = rooms + 2 * actions - 1
    one_hot = [F.one_hot(one, 9).float() for one in (rooms, following)]
    return one_hot[0], actions, (following == 8).float(), one_hot[1], following % 8 == 0


def batches(steps):
    random, moves = torch.Generator().manual_seed(1), memory()
    for _ in range(steps):
        picked = torch.randint(512, (64,), generator=random)
        yield [one[picked] for one in moves]


def loss_of(model, seen, actions, wanted):
    return F.smooth_l1_loss(model(seen).gather(1, actions[:, None])[:, 0], wanted)


def network():
    return nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2))


def plain(steps=12):
    torch.manual_seed(0)
    model, losses = network(), []
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=0.01)
    for step, (seen, actions, rewards, following, ends) in enumerate(batches(steps)):
        with torch.no_grad():
            later = target(following).amax(1)
        wanted = rewards + 0.9 * later * ~ends
        optimizer.zero_grad()
        loss = loss_of(model, seen, actions, wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 4 == 3:
            target.load_state_dict(model.state_dict())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=12):
    torch.manual_seed(0)
    model, losses = network(), []
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, objective=loss_of, **options) as trainer:
        for step, (seen, actions, rewards, following, ends) in enumerate(batches(steps)):
            later = trainer.predict([following], model=target).amax(1)
            wanted = rewards + 0.9 * later * ~ends
            loss = trainer.step(seen, actions, wanted)
            losses.append(loss.item())
            if step % 4 == 3:
                target.load_state_dict(model.state_dict())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
