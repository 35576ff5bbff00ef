"""The sum of gradients that lie on accelerators, through their own backend of torch."""
