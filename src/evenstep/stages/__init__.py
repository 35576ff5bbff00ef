"""The network divided into stages: where its modules lie, and which shard a stage computes next."""
