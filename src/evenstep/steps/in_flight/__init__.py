"""Several steps in flight: their tasks, their updates, and what they read outside of the model."""
