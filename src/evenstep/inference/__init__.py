"""Inference: calls a trained model fast, or exports it as one file."""
