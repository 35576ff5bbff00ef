"""Gradients that are sent to the owners of parameters, and values that only owners have."""
