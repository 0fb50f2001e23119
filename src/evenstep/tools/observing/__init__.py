"""Running somebody's script under observation: one recorder of what it does, for `doctor`, `verify` and `bench`.

Read `patching` first: every change to a class or function of torch's, or of ours, is undone when a `with` ends. Then
`record`: what a script does is told there to subscribers, and nothing else changes torch's functions to see it.

    launch       start a script under observation with `evenstep run`, and leave it on all ranks together
    script       the script: its own files and lines; become it in this process
    record       what it does, moment by moment
    graphs       what the graph behind its loss says
    models       the modules that an optimizer trains, who averages their gradients, digests and samples
    devices      lines where the host waits for a GPU
    changes      dropout off, other batch sizes, keyed samples: so that runs can be compared
    scratch      what the script saves goes into a directory of the run
    thresholds   from when on `bench` reports something

"""
