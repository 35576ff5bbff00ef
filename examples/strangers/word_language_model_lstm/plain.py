"""Trains an LSTM on a text; our own program, of the shape of a public one.

The original: https://github.com/pytorch/examples/blob/main/word_language_model/main.py
The same: columns of a text that are read side by side, (time, batch) parts of them in turn, a state
that is carried over and cut off, gradients that are clipped.
Different: the loss of a part is a function, and SGD updates; there both stand in the loop.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=5.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch_size", type=int, default=20)
parser.add_argument("--bptt", type=int, default=10)
parser.add_argument("--dropout", type=float, default=0.2)
args = parser.parse_args()
torch.manual_seed(1111)

text = " ".join(f"{n} and {n + 1} are {2 * n + 1} ." for n in range(300)).split()
words = sorted({*text})
corpus = torch.tensor([words.index(word) for word in text])


def batchify(data, bsz):
    return data[: len(data) // bsz * bsz].view(bsz, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self, ntoken, size):
        super().__init__()
        self.size = size
        self.drop = nn.Dropout(args.dropout)
        self.encoder, self.decoder = nn.Embedding(ntoken, size), nn.Linear(size, ntoken)
        self.rnn = nn.LSTM(size, size, num_layers=2, dropout=args.dropout)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        decoded = self.decoder(self.drop(output)).flatten(0, 1)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        return torch.zeros(2, bsz, self.size), torch.zeros(2, bsz, self.size)


def repackage_hidden(hidden):
    """Cut the state off from the parts that it comes from."""
    return tuple(part.detach() for part in hidden)


def get_batch(source, i):
    length = min(args.bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length]


train_data, val_data = batchify(corpus[:1400], args.batch_size), batchify(corpus[1400:], 4)
model = RNNModel(len(words), 32)
criterion = nn.NLLLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)


def loss_of(model, data, targets, hidden):
    output, (h, c) = model(data, hidden)
    return criterion(output, targets.flatten()), (h, c)


def evaluate(source):
    model.eval()
    total, hidden = 0.0, model.init_hidden(4)
    with torch.no_grad():
        for i in range(0, len(source) - 1, args.bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets.flatten()).item()
    return total / (len(source) - 1)


def train(epoch):
    model.train()
    hidden = model.init_hidden(args.batch_size)
    for i in range(0, len(train_data) - 1, args.bptt):
        data, targets = get_batch(train_data, i)
        optimizer.zero_grad()
        loss, hidden = loss_of(model, data, targets, hidden)
        hidden = repackage_hidden(hidden)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        print(f"epoch {epoch}, batch {i // args.bptt}: loss {loss.item():.6f}")


for epoch in range(1, args.epochs + 1):
    train(epoch)
    print(f"end of epoch {epoch}, valid loss {evaluate(val_data):.4f}")
