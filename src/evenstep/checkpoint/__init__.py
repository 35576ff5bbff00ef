"""Checkpoints: the training state, written to disk, read back exactly, and compared."""
