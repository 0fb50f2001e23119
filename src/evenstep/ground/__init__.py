"""What every room stands on: who this rank is, what can be seen of it from outside, and what torch calls privately.

By their place in the order of imports, from the roof down:

1. `coordination`: how ranks agree before they train.
2. `health`: a rank's heartbeat page, its report when it fails, and the watching of others.
3. `compat`: names of torch that aren't public, and functions of the C library.
4. `environment`: this rank's place in the run, as launchers describe it in variables.
"""
