"""The book's experiments with the engine, each beside bare threads that do the same."""
