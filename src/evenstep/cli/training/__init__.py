"""`evenstep train`: from the options to the record of the results."""
