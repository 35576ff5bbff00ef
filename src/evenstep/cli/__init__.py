"""The command line, `evenstep`."""

from evenstep.cli.app import main

__all__ = ["main"]
