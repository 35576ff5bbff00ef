"""Fine-tunes a BERT with a loop of its own; our own program, of the shape of a public one.

The original: https://github.com/huggingface/transformers/blob/main/examples/pytorch/text-classification/run_glue_no_trainer.py
The same: a Hugging Face model that computes its loss, a collate function that pads a batch to its
longest text, AdamW with two groups, a linear schedule, `model(**batch)`, a bar and an evaluation.
Different: the weights are random and the texts made here, and no accelerate prepares the parts.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler, set_seed


def texts(count, seed):
    """Make texts of 4 to 12 tokens; the label says whether token 5 is among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (count,), generator=generator).tolist()
    tokens = [torch.randint(3, 20, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": one, "labels": int(5 in one)} for one in tokens]


def data_collator(examples):
    longest = max(len(one["input_ids"]) for one in examples)
    rows = [one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in examples]
    input_ids = torch.tensor(rows)
    labels = torch.tensor([one["labels"] for one in examples])
    return {"input_ids": input_ids, "attention_mask": (input_ids > 0).long(), "labels": labels}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_seed(args.seed)

    config = BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16, num_labels=2,
        hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    size = args.per_device_train_batch_size
    train_dataloader = DataLoader(texts(160, 1), size, shuffle=True, collate_fn=data_collator)
    eval_dataloader = DataLoader(texts(64, 2), size, collate_fn=data_collator)

    no_decay = ("bias", "LayerNorm.weight")
    named = [*model.named_parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
            {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
    )
    max_train_steps = args.num_train_epochs * len(train_dataloader)
    lr_scheduler = get_scheduler("linear", optimizer, 2, max_train_steps)

    completed_steps = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            completed_steps += 1
            print(f"{completed_steps}/{max_train_steps}: loss {loss.item():.6f}")

        model.eval()
        right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            right += (predictions == batch["labels"]).sum().item()
        print(f"epoch {epoch}: accuracy {right / len(eval_dataloader.dataset):.3f}")


if __name__ == "__main__":
    main()
