"""A training step over all devices, from the batch to the update, and the trainer around it."""
