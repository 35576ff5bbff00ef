"""Metrics and predictions over many batches."""
