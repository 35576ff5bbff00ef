"""Trains a small GPT on characters; our own program, of the shape of a public one.

The original: https://github.com/karpathy/nanoGPT/blob/master/train.py
The same: a decoder that returns (logits, loss), random windows of a text, AdamW with a rate that
warms up and decays, accumulated gradients that are clipped, an estimate of both losses.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--max_iters", type=int, default=12)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--micro_steps", type=int, default=2)
config = parser.parse_args()
micro_steps = config.micro_steps  # of which the gradients are accumulated
batch_size, block_size, n_embd, n_head, n_layer = 16, 16, 32, 4, 2
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 3, 1.0
eval_interval, eval_iters = 4, 2
torch.manual_seed(1337)

text = "".join(f"{n} and {n + 1} are {2 * n + 1}. " for n in range(200))
vocabulary = sorted({*text})
data = torch.tensor([vocabulary.index(character) for character in text])
splits = {"train": data[: int(0.9 * len(data))], "val": data[int(0.9 * len(data)) :]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(),
            nn.Linear(4 * n_embd, n_embd), nn.Dropout(config.dropout),
        )  # fmt: skip

    def forward(self, x):
        parts = self.c_attn(self.ln_1(x)).unflatten(2, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        dropout = config.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(*parts, dropout_p=dropout, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(vocabulary), n_embd), nn.Embedding(block_size, n_embd)
        self.drop, self.ln_f = nn.Dropout(config.dropout), nn.LayerNorm(n_embd)
        self.h = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.lm_head = nn.Linear(n_embd, len(vocabulary), bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe.weight[: idx.size(1)])
        logits = self.lm_head(self.ln_f(self.h(x)))
        loss = None if targets is None else F.cross_entropy(logits.mT, targets)
        return logits, loss


def get_batch(split):
    source = splits[split]
    ix = torch.randint(len(source) - block_size, (batch_size,)).tolist()
    x = torch.stack([source[i : i + block_size] for i in ix])
    return x, torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, config.max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = {
        split: sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters
        for split in splits
    }
    model.train()
    return losses


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
iter_num = 0
while iter_num < config.max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        print(f"step {iter_num}: {estimate_loss()}")
    for _ in range(micro_steps):
        X, Y = get_batch("train")
        logits, loss = model(X, Y)
        loss = loss / micro_steps
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    print(f"iter {iter_num}: loss {loss.item() * micro_steps:.6f}")
