"""The trainer: what users call, around the steps."""
