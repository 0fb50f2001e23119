"""`evenstep estimate`: how much memory a rank needs, and which parallelism is enough.

In reading order:

    footprint   what a rank keeps in memory, by way of sharding                    pure
    probe       the sizes behind that, measured in a process that runs the script
    estimate    the command
"""
