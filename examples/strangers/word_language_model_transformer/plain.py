"""Trains a transformer on a text; our own program, of the shape of a public one.

The original: https://github.com/pytorch/examples/blob/main/word_language_model/main.py
The same (`--model Transformer`): columns of a text that are read side by side, (time, batch) parts
of them in turn, an encoder that keeps its mask in an attribute until the length changes, clipped
gradients, parameters that the loop updates by hand.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=2.0)
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


class PositionalEncoding(nn.Module):
    def __init__(self, size, max_len=100):
        super().__init__()
        self.dropout = nn.Dropout(args.dropout)
        position = torch.arange(max_len).unsqueeze(1)
        rates = torch.exp(torch.arange(0, size, 2) * (-math.log(10000.0) / size))
        pe = torch.stack((torch.sin(position * rates), torch.cos(position * rates)), 2)
        self.register_buffer("pe", pe.flatten(1).unsqueeze(1))

    def forward(self, x):
        return self.dropout(x + self.pe[: len(x)])


class TransformerModel(nn.Module):
    def __init__(self, ntoken, size):
        super().__init__()
        self.size, self.src_mask = size, None
        self.input_emb, self.decoder = nn.Embedding(ntoken, size), nn.Linear(size, ntoken)
        self.pos_encoder = PositionalEncoding(size)
        layer = nn.TransformerEncoderLayer(size, 2, 2 * size, args.dropout)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src):
        if self.src_mask is None or len(self.src_mask) != len(src):
            self.src_mask = torch.triu(torch.full((len(src), len(src)), -math.inf), diagonal=1)
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(self.size))
        return F.log_softmax(self.decoder(self.encoder(src, mask=self.src_mask)), dim=-1)


def get_batch(source, i):
    length = min(args.bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length]


train_data, val_data = batchify(corpus[:1400], args.batch_size), batchify(corpus[1400:], 4)
model = TransformerModel(len(words), 32)
criterion = nn.NLLLoss()


def loss_of(output, targets):
    return criterion(output.flatten(0, 1), targets.flatten())


def evaluate(source):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for i in range(0, len(source) - 1, args.bptt):
            data, targets = get_batch(source, i)
            total += len(data) * loss_of(model(data), targets).item()
    return total / (len(source) - 1)


def train(epoch):
    model.train()
    for i in range(0, len(train_data) - 1, args.bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        output = model(data)
        loss = loss_of(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-args.lr)
        print(f"epoch {epoch}, batch {i // args.bptt}: loss {loss.item():.6f}")


for epoch in range(1, args.epochs + 1):
    train(epoch)
    print(f"end of epoch {epoch}, valid loss {evaluate(val_data):.4f}")
