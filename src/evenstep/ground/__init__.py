"""The base of all rooms: this rank's placement, its state as seen from outside, its host, and torch's private names.

In the order of imports; each package may import the packages below it:

1. `computing`: everything that results depend on, such as random streams and torch's settings.
2. `coordination`: how ranks agree before they train.
3. `health`: a rank's heartbeat page, its report when it fails, and how ranks watch each other.
4. `compat`: names of torch that aren't public, and functions of the C library.
5. `environment`: this rank's place in the run, as launchers describe it in variables.
6. `host`: ports, processes and files of this machine.
"""
