"""The sections of docs/benchmarks.md, each from one result file."""
