"""Runs a user's script under observation: one recorder of its calls, for `doctor`, `verify`, `bench` and `estimate`.

Read `patching` first: every change to a class or function, of torch or of evenstep, is undone when a `with` ends. Then
`record`, which notifies subscribers of what the script does. Nothing else patches torch's functions to observe it.

    launch       starts a script under observation with `evenstep run`, and ends it on all ranks together
    script       the script's own files and lines; running it in this process
    record       notifies subscribers of calls, passes, steps and loops
    graphs       reads the autograd graph behind a loss
    models       the modules that an optimizer trains, and their wrapper; digests of tensors
    devices      the lines where the host waits for a GPU
    changes      makes runs comparable: no dropout, other batch sizes, random numbers keyed by sample
    scratch      redirects the files that the script writes into a directory of the run
    thresholds   the thresholds above which `bench` reports a finding

"""
