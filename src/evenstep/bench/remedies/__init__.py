"""`evenstep bench --try`: the script again with one change each, made at run time; measured beside the unchanged one.

In reading order:

    changes    the changes, which of them are tried, and what they should gain      pure
    results    gains with their spread, whether losses agree, the best combination  pure
    apply      makes changes in the process of a rank, before the script runs
    probe      one rank of a run with changes
    calibrate  what exchanges and optimizers cost here, apart from the script
    trials     starts the runs, in rounds that alternate with the unchanged script
    table      what came of it, for people
"""
