"""Are two runs the same? On other numbers of ranks, and killed and resumed against left alone."""
