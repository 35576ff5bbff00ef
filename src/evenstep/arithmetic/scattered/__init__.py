"""Kernels that add into places: rows by index, windows that overlap, interpolated pixels."""
