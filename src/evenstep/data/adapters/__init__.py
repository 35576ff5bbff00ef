"""Loaders of other libraries, and any iterable of batches, as the data of a training."""
