"""Profiling: records what devices do, and adds up where their time goes."""
