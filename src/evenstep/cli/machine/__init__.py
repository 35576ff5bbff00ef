"""`evenstep doctor` and `evenstep devices`: what this machine has, and what it lacks."""
