"""Checkpoints that exist completely or not at all, and the exact way back into them.

Read in this order; each imports only from those below it:

- `checkpointer`: `Checkpointer`, the public class: when to save, when to stop, how to resume.
- `tier`: copies of the newest step on each node's own disk, and their guarantees.
- `tools`: the sub-commands of `evenstep checkpoint` that read checkpoints. `exchange` and `dcp`: the sub-commands that
  export and import them.
- `save/`: saving: `commit` (a whole save), `snapshot` (copies to memory), `writer` (the thread), `stopping`.
- `load/`: loading: `restore` (a whole load), `compare` (does the state fit?), `reader` (checks every byte), `layouts`.
- `directory` (the run's checkpoints, how they are made and removed), `lock` (one job per directory, and which manifests
  count), `store` (put, open, list and remove, in a directory or by fsspec).
- `format/`: the files, pure: `tree` (state to JSON and tensors), `plan` (which rank writes what), `regions` (which
  elements of a divided tensor a rank holds), `payload` and `manifest` (the bytes), `random_streams`.
"""
