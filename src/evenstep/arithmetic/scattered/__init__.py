"""Kernels that accumulate: rows by index, overlapping windows, interpolated pixels."""
