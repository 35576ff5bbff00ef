"""What an accelerator shows of evenstep: `make gpu`."""
