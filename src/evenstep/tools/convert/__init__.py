"""A single-process training script becomes a data-parallel one, its formatting and comments kept.

In reading order:

    convert     reads, converts in memory, compares, writes: as a whole or not at all
    plan        decides all changes, or why there are none; where ranks are joined
    data        loaders: which are divided over ranks; epochs
    models      which are trained, where they are wrapped, and their backward passes
    output      rank 0 prints, writes and shows; devices
    loops       which loops train and which evaluate, their batches, and what they add up
    work        what these share: the script, the changes so far, and what is said of it
    edits       changes to a tree, applied in one go
    losses      whether a number is a mean over samples, or a sum                           pure
    values      which names hold models, loaders, batches                                   pure
    source      a script with parents, lines and the names that it imports                  pure
"""
