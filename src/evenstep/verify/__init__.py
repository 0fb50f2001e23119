"""Are two runs the same? So far: a run that was killed and resumed, and one that was left alone."""
