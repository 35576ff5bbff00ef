"""The options of commands: declared as tables, from which everything else is derived."""
