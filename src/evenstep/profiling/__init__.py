"""Profiling: records what devices do, adds up where their time goes, and suggests improvements."""
