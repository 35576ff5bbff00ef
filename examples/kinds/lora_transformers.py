"""LoRA: a frozen model of transformers learns by small matrices, with the library's Trainer."""

import tempfile

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from evenstep.integrations.transformers import EvenTrainer


class Lora(nn.Module):
    """Adds a product of two small matrices, of which the second begins with zeros."""

    def __init__(self, inside, inputs, outputs, rank=2):
        super().__init__()
        self.inside = inside
        self.a = nn.Parameter(torch.randn(inputs, rank) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, X):
        return self.inside(X) + X @ self.a @ self.b


def adapted():
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops)).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Lora(block.attn.c_attn, 16, 48)
    return model


def examples():
    tokens = torch.randint(8, (256, 12), generator=torch.Generator().manual_seed(0)).cumsum(1) % 50
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder, steps):
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    speed = {"learning_rate": 0.05, "max_steps": steps, "per_device_train_batch_size": 32}
    return TrainingArguments(folder, use_cpu=True, **quiet, **speed)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain(steps=6):
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model, args = adapted(), arguments(folder, steps)
        trainer = Trainer(model=model, args=args, train_dataset=examples())
        trainer.train()
    return model, trainer.optimizer.optimizer, losses_of(trainer)


def even(devices="auto", shards=8, steps=6):
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model, args = adapted(), arguments(folder, steps)
        options = {"devices": devices, "shards": shards}
        trainer = EvenTrainer(model=model, args=args, train_dataset=examples(), **options)
        trainer.train()
    return model, trainer.optimizer.optimizer, losses_of(trainer)


if __name__ == "__main__":
    print(even()[-1])
