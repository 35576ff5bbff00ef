"""Kernels that add: products, convolutions, reductions, norms, pooling, rows by index."""
