"""Runs of anybody's scripts, recorded and compared."""
