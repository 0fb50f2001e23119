"""Saving: from the objects of a run to a committed folder.

Read `commit` first: a `Saver` makes the plan, copies this rank's tensors to memory with `snapshot`, and passes them to
the thread of `writer`; rank 0 commits when all receipts have come. `stopping` makes all ranks save at the same step
after a signal.
"""
