"""What a command line of `evenstep run` means: `flags`, `ranks`, then `resources` (ranks and threads) and `logs`."""
