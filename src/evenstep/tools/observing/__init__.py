"""Running somebody's script under observation, once for `bench`, `verify` and rehearsals.

Read `patching` first: every change to a class or function of torch's, or of ours, is undone when a `with` ends. Then
what a script is seen through, each on its own:

    script       become the script in this process, observed
    steps        the outermost optimizer steps
    models       the modules that an optimizer trains, and who averages their gradients
    loaders      torch's and evenstep's loaders: waiting for data, batch sizes
    scratch      what the script saves goes into a directory of the run
    thresholds   from when on `bench` and `verify` report something
    rehearsal    a script's `Checkpointer` saves, dies and resumes as a plan says
"""
