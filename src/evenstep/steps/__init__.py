"""One training step over all devices and processes, from the batch to the update."""
