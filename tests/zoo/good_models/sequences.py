"""Text, speech and time series."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from good_models.recipe import (
    ADAM,
    ADAMW,
    SPARSE_ADAM,
    Recipe,
    labelled_tokens,
    mlp,
    padded,
    sequences,
    summed,
    tokens,
)

CROSS_ENTROPY = nn.CrossEntropyLoss()
WORDS = 11


class LastState(nn.Module):
    """A recurrent network, whose last output is classified."""

    def __init__(self, recurrent, width):
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


class CellLoop(nn.Module):
    """A recurrent cell in a loop over time, from a state of zeros."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, 6), nn.Linear(6, 5)

    def forward(self, x):
        state = (x.new_zeros(len(x), 6), x.new_zeros(len(x), 6))
        for now in x.unbind(1):
            state = self.cell(now, state)
        return self.head(state[0])


class Tagger(nn.Module):
    """Scores of five tags for each word of packed sequences, both directions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5, padding_idx=0)
        self.recurrent = nn.GRU(5, 4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(
            self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(
            self.recurrent(packed)[0], batch_first=True, total_length=words.shape[1]
        )
        return self.head(states)


def is_word(lengths, longest):
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def tags_and_lengths(length=8):
    return padded(lambda n: (*tokens(length)(n), torch.randint(5, (n, length))), length)


def tagging(model, words, tags, lengths):
    losses = F.cross_entropy(model(words, lengths).mT, tags, reduction="none")
    mask = is_word(lengths, words.shape[1])
    return (losses * mask).sum(), mask.sum()


class ChainTagger(Tagger):
    """With a conditional random field over the tags (Lample et al., 2016)."""

    def __init__(self):
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(5, 5) * 0.1)


def chain_likelihood(model, words, tags, lengths):
    scores, mask = model(words, lengths), is_word(lengths, words.shape[1])
    chosen = scores.gather(2, tags[..., None])[..., 0]
    moves = model.transitions[tags[:, :-1], tags[:, 1:]]
    path = (chosen * mask).sum(1) + (moves * mask[:, 1:]).sum(1)
    alpha = scores[:, 0]
    for now, alive in zip(scores.unbind(1)[1:], mask.unbind(1)[1:], strict=True):
        after = (alpha[:, :, None] + model.transitions).logsumexp(1) + now
        alpha = torch.where(alive[:, None], after, alpha)
    return summed(alpha.logsumexp(1) - path)


class Translator(nn.Module):
    """A GRU that reads, and one that writes with attention (Luong et al., 2015)."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, 6), nn.Embedding(WORDS, 6)
        self.reader = nn.GRU(6, 6, batch_first=True)
        self.writer, self.score = nn.GRUCell(12, 6), nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(12, WORDS)

    def forward(self, source, target):
        memory, last = self.reader(self.source(source))
        state, context, outputs = last[0], torch.zeros_like(last[0]), []
        word = target[:, 0]
        for number in range(1, target.shape[1]):
            state = self.writer(torch.cat([self.target(word), context], 1), state)
            weights = (memory @ self.score(state)[..., None]).softmax(1)
            context = (weights * memory).sum(1)
            outputs.append(self.head(torch.cat([state, context], 1)))
            is_forced = not self.training or torch.rand(()) < 0.5
            word = target[:, number] if is_forced else outputs[-1].argmax(1)
        return torch.stack(outputs, 1)


def translation(model, source, target):
    logits, wanted = model(source, target), target[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"), wanted.numel()


def sinusoids(length, width):
    """Return the positional encoding of "Attention Is All You Need", section 3.5."""
    angles = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class TransformerEncoder(nn.Module):
    """Classifies padded sequences by the mean over their words."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.register_buffer("places", sinusoids(8, width), persistent=False)
        layer = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, words, lengths):
        mask = is_word(lengths, words.shape[1])
        states = self.layers(self.embed(words) + self.places, src_key_padding_mask=~mask)
        return self.head((states * mask[..., None]).sum(1) / lengths[:, None])


def classification(model, words, labels, lengths):
    return F.cross_entropy(model(words, lengths), labels, reduction="sum"), len(labels)


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(),
                                 nn.Linear(2 * width, width), nn.Dropout(dropout))  # fmt: skip

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0, is_causal=True,
        )  # fmt: skip
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout,
                          self.training)  # fmt: skip
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A decoder that returns its loss beside the logits, and whose head is its embedding."""

    def __init__(self, width=8, layers=2, dropout=0.1):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token(model, ids):
    wanted = ids[:, 1:].flatten()
    logits = model(ids[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, wanted, reduction="sum"), wanted.numel()


def decayed(parameters):
    """AdamW without decay for biases and norms."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Experts(nn.Module):
    """Each word goes to the two best of four experts (Mixtral, 2024, section 2.1)."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(mlp(width, 10, width) for _ in range(4))

    def forward(self, x):
        words = x.flatten(0, -2)
        scores, chosen = self.gate(words).topk(2)
        weights, mixed = scores.softmax(-1), torch.zeros_like(words)
        for number, expert in enumerate(self.experts):
            word, rank = (chosen == number).nonzero(as_tuple=True)
            mixed.index_add_(0, word, weights[word, rank, None] * expert(words[word]))
        return mixed.view_as(x)


class RotaryGPT(nn.Module):
    """Rotary places, kept in a table that is made when it is first needed, and experts."""

    def __init__(self, width=8):
        super().__init__()
        self.words, self.qkv = nn.Embedding(WORDS, width), nn.Linear(width, 3 * width)
        self.norm, self.experts = RMSNorm(width), Experts(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.table = None

    def rotate(self, x):
        if self.table is None or len(self.table) < x.shape[1]:
            angles = torch.outer(torch.arange(16.0), 0.5 ** torch.arange(x.shape[2] // 2))
            self.table = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.table[: x.shape[1]]).flatten(-2)

    def forward(self, ids):
        x = self.words(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.head(x + self.experts(x))


def masked_words(model, words, lengths):
    """Hide words at random, and ask for them (BERT, 2019, section 3.1)."""
    is_hidden = (torch.rand(words.shape) < 0.3) & is_word(lengths, words.shape[1])
    logits = model(words.masked_fill(is_hidden, WORDS - 1), lengths)
    losses = F.cross_entropy(logits.mT, words, reduction="none")
    return (losses * is_hidden).sum(), is_hidden.sum()


class MaskedLM(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words, lengths):
        mask = is_word(lengths, words.shape[1])
        return self.head(self.layer(self.embed(words), src_key_padding_mask=~mask))


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Embedding(WORDS, 5, sparse=True)
        self.contexts = nn.Embedding(WORDS, 5, sparse=True)

    def forward(self, centres, contexts):
        return (self.centres(centres)[:, None] * self.contexts(contexts)).sum(-1)


def negative_sampling(model, centres, contexts, negatives):
    likely, unlikely = model(centres, contexts[:, None]), model(centres, negatives)
    return summed(-F.logsigmoid(likely).sum(1) - F.logsigmoid(-unlikely).sum(1))


def word_pairs(n):
    return (torch.randint(WORDS, (n,)), torch.randint(WORDS, (n,)), torch.randint(WORDS, (n, 4)))


class CausalConvolution(nn.Module):
    """A residual, dilated convolution with weight norm (TCN, Bai et al., 2018)."""

    def __init__(self, width, dilation):
        super().__init__()
        self.dilation = dilation
        self.conv = weight_norm(nn.Conv1d(width, width, 2, dilation=dilation))

    def forward(self, x):
        return x + F.dropout(self.conv(F.pad(x, (self.dilation, 0))).relu(), 0.1, self.training)


def tcn():
    return nn.Sequential(
        nn.Linear(4, 6), Swapped(), *(CausalConvolution(6, d) for d in (1, 2, 4)),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip


class Swapped(nn.Module):
    def forward(self, x):
        return x.mT


def ctc(model, X, wanted, lengths):
    log_probabilities = model(X).log_softmax(-1).transpose(0, 1)
    steps = torch.full_like(lengths, X.shape[1])
    return F.ctc_loss(log_probabilities, wanted, steps, lengths, reduction="sum"), lengths.sum()


def spoken(n):
    return torch.randn(n, 9, 4), torch.randint(1, 6, (n, 3)), torch.randint(1, 4, (n,))


class PerStep(nn.Module):
    """A recurrent network with scores for every step."""

    def __init__(self, classes=6):
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


class Forecaster(nn.Module):
    """The mean and the spread of the next value (DeepAR, 2017)."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(1, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        mean, spread = self.head(self.recurrent(x[..., None])[0]).unbind(-1)
        return mean, F.softplus(spread) + 1e-3


def likelihood(model, series):
    mean, spread = model(series[:, :-1])
    losses = F.gaussian_nll_loss(mean, series[:, 1:], spread**2, reduction="none")
    return losses.sum(), losses.numel()


SEQUENCES = {
    "lstm": Recipe(
        lambda: LastState(nn.LSTM(4, 6, 2, dropout=0.2, batch_first=True), 6), sequences(),
        CROSS_ENTROPY),
    "gru": Recipe(lambda: LastState(nn.GRU(4, 6, batch_first=True), 6), sequences(), CROSS_ENTROPY),
    "recurrent cell": Recipe(CellLoop, sequences(), CROSS_ENTROPY, make_optimizer=ADAM),
    "packed sequences": Recipe(Tagger, tags_and_lengths(), objective=tagging),
    "conditional random field": Recipe(
        ChainTagger, tags_and_lengths(), objective=chain_likelihood, make_optimizer=ADAM),
    "seq2seq with attention": Recipe(
        Translator, lambda n: (*tokens()(n), *tokens(6)(n)), objective=translation,
        make_optimizer=ADAM),
    "transformer encoder": Recipe(
        TransformerEncoder, padded(labelled_tokens()), objective=classification,
        make_optimizer=ADAM),
    "gpt": Recipe(GPT, tokens(9), objective=next_token, make_optimizer=decayed),
    "mixture of experts": Recipe(
        RotaryGPT, tokens(9), objective=next_token, make_optimizer=ADAMW),
    "masked words": Recipe(
        MaskedLM, padded(tokens()), objective=masked_words, make_optimizer=ADAMW),
    "embedding bag": Recipe(
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 6, padding_idx=0), nn.Linear(6, 5)),
        labelled_tokens(), CROSS_ENTROPY),
    "sparse embeddings": Recipe(
        lambda: nn.Sequential(nn.Embedding(WORDS, 6, sparse=True), nn.Flatten(), mlp(48, 8, 5)),
        labelled_tokens(), CROSS_ENTROPY,
        make_optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
    "word2vec": Recipe(
        SkipGram, word_pairs, objective=negative_sampling, make_optimizer=SPARSE_ADAM),
    "causal convolutions": Recipe(tcn, sequences(), CROSS_ENTROPY, make_optimizer=ADAM),
    "ctc": Recipe(PerStep, spoken, objective=ctc, make_optimizer=ADAM),
    "forecast": Recipe(
        Forecaster, lambda n: (torch.randn(n, 8),), objective=likelihood, make_optimizer=ADAM),
}  # fmt: skip
