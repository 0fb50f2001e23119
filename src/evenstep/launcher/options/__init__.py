"""The options of `evenstep run`: `flags`, `ranks`, then `resources` (ranks and threads) and `logs`."""
