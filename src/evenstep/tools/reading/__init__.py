"""Reading a script: what its calls and names are, and on which ranks and in which loops they run.

LibCST parses. `convert` asks about nodes, `doctor` about records of them; both ask the same tree and the same values.
In reading order:

    source     the text of a file or notebook, its encoding, its comments for `doctor`
    tree       a file: nodes with parents, lines and what they stand in; names; records of calls, assignments, loops
    program    a script and the modules that it takes names from
    values     what names stand for: loaders, batches, models, optimizers, functions, ranks
    looked     what was looked at, and what a run is judged by                     pure
    contexts   where calls run: on which ranks, in which loops, how often
"""
