"""The training state: taken, written to disk, read back exactly, and compared."""
