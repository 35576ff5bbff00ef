"""Whether the losses and the gradients of shards add up to those of the batch."""
