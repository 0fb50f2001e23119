"""A single-process training script becomes a data-parallel one, its formatting and comments kept.

In reading order:

    convert     reads, converts in memory, compares, writes: as a whole or not at all
    replay      does the result compute what the script did, in one process?
    plan        decides all changes, or why there are none; where ranks are joined
    data        loaders: which are divided over ranks; epochs
    models      which are trained, where they are wrapped, and their backward passes
    output      rank 0 prints, writes and shows; devices
    metrics     the numbers that are added up, shown and kept; which evaluations are divided
    loops       which loops train and which evaluate, what gives them batches, and what a batch weighs
    edits       what these share: the script, the changes so far, and what is said of it; applied in one go
    losses      whether a number is a mean over samples, or a sum                           pure
    values      which names hold models, loaders, batches                                   pure
"""
