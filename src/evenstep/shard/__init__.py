"""What is computed for one shard: forward, backward, loss, gradients and metrics."""
