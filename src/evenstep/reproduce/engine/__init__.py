"""The experiments with the engine: each module is a script that takes one measurement."""
