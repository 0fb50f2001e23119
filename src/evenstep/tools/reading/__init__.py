"""Static analysis of a script: what its calls and names are, and on which ranks and in which loops they run.

LibCST parses. `convert` works on syntax nodes, `doctor` on records of them. Both use the same tree and the same
values. In reading order:

    source     the text of a file or notebook, its encoding, its comments for `doctor`
    tree       a file: nodes with parents, lines and frames; names; records of calls, assignments, loops
    program    a script and its own modules that it imports from
    values     what names stand for: loaders, batches, models, optimizers, functions, ranks
    looked     what doctor examined, and the facts that a run is judged by         pure
    contexts   on which ranks, in which loops and how often calls run
"""
