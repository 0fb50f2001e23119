"""Reading a script: what its calls and names are, and on which ranks and in which loops they run.

LibCST parses. In reading order:

    source     the text of a file or notebook, its encoding, its comments for `doctor`
    program    a file as records: calls, assignments, loops, functions
    values     what names stand for: loaders, samplers, models, optimizers, ranks
    looked     what was looked at, and what a run is judged by                     pure
    contexts   where calls run: on which ranks, in which loops, how often
"""
