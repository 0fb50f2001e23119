"""Checkpoints that exist completely or not at all, and the exact way back into them.

Read in this order; each imports only from those that stand below it:

- `checkpointer`: `Checkpointer`, the public class: when to save, when to stop, how to resume.
- `tier`: copies of the newest step on each node's own disk, and what holds of them.
- `tools`: the sub-commands of `evenstep checkpoint` that look at checkpoints; `exchange` and `dcp`: those that exchange
  them with other programs.
- `save/`: the way of a save: `commit` (all of it), `snapshot` (copies to memory), `writer` (the thread), `stopping`.
- `load/`: the way back: `restore` (all of it), `compare` (does it fit?), `reader` (every byte confirmed), `layouts`.
- `directory` (the run's checkpoints, and how they come and go), `lock` (one job per directory, and which manifests
  count), `store` (put, open, list and remove, in a directory or by fsspec).
- `format/`: the files, pure: `tree` (state to JSON and tensors), `plan` (which rank writes what), `regions` (which
  elements of a divided tensor a rank holds), `payload` and `manifest` (the bytes), `random_streams`.
"""
