"""Checks before a long run: this node, and whether the ranks compute and communicate correctly.

Reading order:

- `host_report`: the report of `evenstep env` on this node and its software. `torchs_report` is torch's own report,
  `collect` gathers what torch's leaves out, and `render` (pure) makes the text. It opens no port and starts no rank.
- `rank_check`: `evenstep run --check`, started as a module on every rank. It compares a sum and a training step with
  those of one process, and measures pairs of ranks. `choose_pairs` and `slow_pairs` are pure.
"""
