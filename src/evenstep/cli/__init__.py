"""The command line: `evenstep train`, `evenstep verify`, `evenstep devices`."""

from evenstep.cli.app import main

__all__ = ["main"]
