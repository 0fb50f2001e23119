"""`evenstep bench`: measures how well a script scales, and finds what keeps it from scaling better.

In reading order:

    command     `evenstep bench run` and `evenstep bench compare`
    plan        the runs and their order                                          pure
    runs        starts the runs one after the other and reads the records of their ranks

    In one rank of such a run:

        probe       counts steps, profiles some, ends the run, writes the record
        watching    times of forward and backward passes, and losses

    From records to causes:

        profile     from a trace of torch's profiler to kernels and collectives       pure
        records     a rank's record, and its steps in parts                           pure
        decompose   from the steps of all ranks to the parts of a step                pure
        scaling     from runs to efficiency with its spread                           pure
        findings    causes with their expected gain                                   pure

    report      `report.json`, and tables
    compare     compares several scripts in alternating rounds
"""
