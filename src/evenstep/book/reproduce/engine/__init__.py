"""Each of the book's experiments with the engine, as a process of its own."""
