"""`--processes`: the same command in several processes of this machine."""
