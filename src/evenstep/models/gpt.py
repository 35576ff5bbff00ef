"""A small GPT: a decoder-only transformer over a vocabulary of tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class _Block(nn.Module):
    """Causal self-attention and a feed-forward network, each normalised first and added."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention = nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_output = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self._attend(self.norm_attention(states))
        transformed: torch.Tensor = self.feed_forward(self.norm_feed_forward(states))
        return states + transformed

    def _attend(self, states: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        by_head = self.to_qkv(states).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = by_head.chunk(3, dim=1)  # (n, heads, time, width / heads) each
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        joined = attended.transpose(1, 2).flatten(2)
        return F.dropout(self.to_output(joined), self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer whose output layer shares the weights of the token embedding."""

    def __init__(
        self, vocabulary: int, layers: int, heads: int, width: int, context: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(heads, width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores (n, time, vocabulary) of the token after each of int64 (n, time)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.dropout(self.tokens(tokens) + self.positions(places))
        return F.linear(self.norm(self.blocks(states)), self.tokens.weight)


def gpt(
    vocabulary: int = 65,
    layers: int = 6,
    heads: int = 6,
    width: int = 384,
    context: int = 256,
    dropout: float = 0.2,
) -> GPT:
    """Return a GPT with the dimensions of nanoGPT's model of Shakespeare's characters.

    The architecture is that of "Language Models are Unsupervised Multitask Learners" (Radford et
    al., 2019); the dimensions are in https://github.com/karpathy/nanoGPT.

    Args:
        vocabulary: number of different tokens.
        layers: number of transformer blocks.
        heads: number of attention heads; a divisor of `width`.
        width: number of values in the state of a token.
        context: greatest number of tokens in a sequence.
        dropout: probability of a zero, in attention, blocks and embeddings.

    Returns:
        A module that maps int64 tokens (n, time) to scores (n, time, vocabulary).
    """
    return GPT(vocabulary, layers, heads, width, context, dropout)
