"""What lies outside of the model, and a shard must not touch: modules, generators, settings."""
