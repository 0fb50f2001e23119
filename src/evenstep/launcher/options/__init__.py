"""What a command line of `evenstep run` means: `flags`, then `resources` (ranks and threads) and `logs`."""
