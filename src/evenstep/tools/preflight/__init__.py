"""Checks before a long run: this node, and whether the ranks compute and communicate correctly.

Reading order:

- `host_report`: what `evenstep env` prints of this node and its software. `torchs_report` asks torch, `collect` adds
  what torch doesn't say, and `render` is pure; it opens no port and starts no rank.
- `rank_check`: `evenstep run --check`, started as a module on every rank. It compares a sum and a training step with
  one process's, and measures pairs of ranks. `choose_pairs` and `slow_pairs` are pure.
"""
