"""Kernels of single elements: functions, scaled sums, evenly spaced and random numbers."""
