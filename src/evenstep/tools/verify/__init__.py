"""`evenstep verify`: compares runs on several numbers of ranks, or a resumed run with an undisturbed one.

In reading order:

    ranks       `evenstep verify`: runs a script on several numbers of ranks, in float32 and float64
    rank        one rank of such a run: records the samples, losses, gradients and parameters of each step
    double      in a rank: runs the script in float64
    evidence    the record of a run: one line of JSON and two files a step
    compare     where two runs differ by more than rounding                      pure
    causes      the usual causes of such a difference                            pure
    report      the result as a table and as JSON
    resume      `evenstep verify --resume`: runs, kills, resumes and compares
    rehearsal   one rank of such a run: saves and dies as a plan says
    traces      where a resumed run differs from an undisturbed one              pure
"""
