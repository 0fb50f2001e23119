"""Converts a single-process training script to a data-parallel one, and keeps its formatting and comments.

In reading order:

    convert     reads a script, converts it in memory, compares both, and writes the whole result or nothing
    replay      compares the result with the original script, in one process
    plan        decides all changes, or why there are none; where the ranks are joined
    data        which loaders are divided over ranks
    models      which models are trained, where they are wrapped, and their backward passes
    output      printing, files, trackers and progress bars on rank 0 only; devices
    metrics     the numbers that are added up, shown and kept; which evaluations are divided
    kept        losses that depend on earlier batches, unread code or the size of whole batches
    loops       which loops train and which evaluate, the loaders that they read, and the weight of a batch
    edits       state that these share: the script, the changes so far, and remarks; applies all changes at once
    losses      whether a number is a mean over samples, or a sum                           pure
    values      which names hold models, loaders, batches                                   pure
"""
