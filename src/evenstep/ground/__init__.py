"""The base of all rooms: this rank's placement, its state as seen from outside, and torch's private names.

In the order of imports; each may import those below it:

1. `coordination`: how ranks agree before they train.
2. `health`: a rank's heartbeat page, its report when it fails, and the watching of others.
3. `compat`: names of torch that aren't public, and functions of the C library.
4. `environment`: this rank's place in the run, as launchers describe it in variables.
"""
