"""Measurements of the seeds' programs, which `evenstep reproduce --only mxnet` runs."""
