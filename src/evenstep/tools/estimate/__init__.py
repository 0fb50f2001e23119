"""`evenstep estimate`: how much memory a rank needs, and which parallelism is enough.

In reading order:

    footprint   the memory of a rank, for each kind of sharding                    pure
    probe       the sizes that this needs, measured in a process that runs the script
    estimate    the command
"""
