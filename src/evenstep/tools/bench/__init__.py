"""How well a script scales, and why not better: `evenstep bench`.

In reading order:

    command     `evenstep bench run` and `evenstep bench compare`
    plan        which runs, in which order                                        pure
    runs        starts them one after the other and reads the records of their ranks

One rank of such a run:

    probe       counts steps, has some of them profiled, ends the run, leaves the record
    watching    when forward and backward passes begin and end, and with which loss

From records to causes:

    profile     a trace of torch's profiler in; kernels and collectives out     pure
    records     what a rank leaves: marks in, steps in parts out                  pure
    decompose   steps of all ranks in, where the time went out                    pure
    scaling     runs in, efficiency with its spread out                           pure
    findings    causes with their expected gain                                   pure
    report      `report.json`, and tables
    compare     scripts beside each other, in alternating rounds
"""
