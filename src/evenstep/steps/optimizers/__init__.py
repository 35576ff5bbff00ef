"""Optimizers that step beside the trainer, or evaluate a batch as often as they like."""
