"""Saving: from the objects of a run to a committed folder.

Read `commit` first: a `Saver` makes the plan, has `snapshot` copy this rank's tensors to memory, and gives them to the
thread of `writer`; rank 0 commits when all receipts have come. `stopping` turns signals into a save at the same step
on all ranks.
"""
