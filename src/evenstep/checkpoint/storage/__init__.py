"""Where checkpoints lie.

`directory` is the run's directory as all ranks know it: which folders are checkpoints, and the renames by which they
come and go. `storage` is the seam below it, with an implementation for file systems; `lease` is that one's lock file.
"""
