"""The kinds of training that are measured: images with plain SGD, and text with AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from evenstep.errors import ModelError
from evenstep.models.gpt import gpt
from evenstep.models.registry import find_factory

Scores: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Scores (n, classes), and labels (n,)."""

CHARACTERS = 65  # in the works of Shakespeare, as nanoGPT counts them
_BERT_WORDS, _SENTENCE = 30522, (16, 128)  # the vocabulary; fewest and most tokens of a sentence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A network, and how it is trained. The loss is the mean cross-entropy of all labels."""

    make_network: Callable[[], nn.Module]
    scores: Callable[..., Scores]  # of the model and the tensors of a batch
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    # makes the tensors of some examples; None for the images of the job's data set
    make_examples: Callable[[int], tuple[torch.Tensor, ...]] | None = None

    def loss(self, model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(*self.scores(model, *batch))

    def objective(self, model: nn.Module, *batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the total loss of a shard, and its number of labels."""
        scores, labels = self.scores(model, *batch)
        return F.cross_entropy(scores, labels, reduction="sum"), len(labels)


def find_workload(network: str) -> Workload:
    """Return how a network is trained: "chargpt", "chargpt-small", "bert", or one for images.

    Raises:
        ModelError: the network does not exist, or its module can't be imported.
    """
    if network in TEXT:
        return TEXT[network]()
    return Workload(
        make_network=find_factory(network), scores=_of_images, make_optimizer=_plain_sgd
    )


def _of_images(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Scores:
    return model(images), labels


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _chargpt(layers: int, heads: int, width: int, context: int) -> Workload:
    """Return the training of nanoGPT's model of characters (its config/train_shakespeare_char)."""

    def make_examples(examples: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(CHARACTERS, (examples, context + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def scores(model: nn.Module, tokens: torch.Tensor, following: torch.Tensor) -> Scores:
        return model(tokens).flatten(0, 1), following.flatten()

    return Workload(
        make_network=lambda: gpt(CHARACTERS, layers, heads, width, context, dropout=0.2),
        scores=scores,
        make_optimizer=lambda model: torch.optim.AdamW(
            model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1
        ),
        make_examples=make_examples,
    )


def _bert() -> Workload:
    """Return the fine-tuning of BERT-Tiny (Turc et al., 2019) to tell two kinds of sentences."""
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ModuleNotFoundError as error:
        raise ModelError(
            "the network bert needs transformers: pip install 'evenstep[transformers]'"
        ) from error

    def make_network() -> nn.Module:
        config: Any = BertConfig(
            hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
        )
        return BertForSequenceClassification(config)

    def scores(
        model: nn.Module, words: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
    ) -> Scores:
        return model(input_ids=words, attention_mask=mask).logits, labels

    return Workload(
        make_network=make_network,
        scores=scores,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-5),
        make_examples=_padded_sentences,
    )


def _padded_sentences(examples: int) -> tuple[torch.Tensor, ...]:
    """Return words (n, 128), masks of those that are no padding, and labels (n,)."""
    generator = torch.Generator().manual_seed(1)
    fewest, most = _SENTENCE
    words = torch.randint(1000, _BERT_WORDS, (examples, most), generator=generator)
    lengths = torch.randint(fewest, most + 1, (examples, 1), generator=generator)
    mask = (torch.arange(most) < lengths).long()
    return words * mask, mask, torch.randint(2, (examples,), generator=generator)


TEXT: dict[str, Callable[[], Workload]] = {
    "chargpt": lambda: _chargpt(layers=6, heads=6, width=384, context=256),
    "chargpt-small": lambda: _chargpt(layers=4, heads=4, width=128, context=128),
    "bert": _bert,
}
