"""A trained model put to use: called fast, or written as one file."""
