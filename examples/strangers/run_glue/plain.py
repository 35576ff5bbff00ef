"""Fine-tunes a BERT with transformers' Trainer; our own program, of the shape of a public one.

The original: https://github.com/huggingface/transformers/blob/main/examples/pytorch/text-classification/run_glue.py
The same: a model, data sets, a collate function that pads and a function for metrics, given to
Trainer with TrainingArguments; checkpoints, `resume_from_checkpoint`, an evaluation, a saved model.
Different: the weights are random and the texts made here; few of the arguments are there.
"""

import argparse

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)


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


def compute_metrics(predicted):
    return {"accuracy": (predicted.predictions.argmax(1) == predicted.label_ids).mean().item()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="run_glue")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    training_args = TrainingArguments(
        args.output_dir, num_train_epochs=args.num_train_epochs, per_device_train_batch_size=16,
        learning_rate=2e-3, weight_decay=0.01, warmup_steps=2, max_grad_norm=1.0, logging_steps=1,
        save_steps=7, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    set_seed(training_args.seed)
    config = BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16, num_labels=2,
        hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
    )  # fmt: skip
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        train_dataset=texts(160, seed=1),
        eval_dataset=texts(64, seed=2),
        compute_metrics=compute_metrics,
        data_collator=data_collator,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
