"""Continues sine waves; our own program, of the shape of a public one.

The original: https://github.com/pytorch/examples/blob/main/time_sequence_prediction/train.py
The same: two LSTM cells and a linear layer in double precision, a forward pass that goes on behind
the data if asked to, the whole data set as one batch, LBFGS with a closure that prints the loss.
"""

import argparse

import torch
from torch import nn, optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 11), nn.LSTMCell(11, 11)
        self.linear = nn.Linear(11, 1)

    def forward(self, waves, future=0):
        outputs = []
        states = [torch.zeros(len(waves), 11, dtype=waves.dtype) for _ in range(4)]
        h1, c1, h2, c2 = states
        for step in range(waves.size(1) + future):
            x = waves[:, step : step + 1] if step < waves.size(1) else outputs[-1]
            h1, c1 = self.lstm1(x, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4, help="steps of the optimizer")
    opt = parser.parse_args()
    torch.manual_seed(0)
    starts = torch.randint(-80, 80, (33, 1))
    waves = torch.sin((starts + torch.arange(24)).double() / 20)
    given, target = waves[3:, :-1], waves[3:, 1:]
    test_input, test_target = waves[:3, :-1], waves[:3, 1:]

    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=5)
    for i in range(opt.steps):

        def closure():
            optimizer.zero_grad()
            out = seq(given)
            loss = criterion(out, target)
            print(f"loss {loss.item():.9f}")
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            future = 12
            pred = seq(test_input, future=future)
            print(f"step {i}, test: loss {criterion(pred[:, :-future], test_target).item():.9f}")
