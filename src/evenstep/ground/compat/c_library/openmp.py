"""Threads of torch's CPU operations that wait for the next one by turning round and round.

[Note: a team that spins]

An operation that runs in several threads leaves its OpenMP team behind, and for some milliseconds its members look for
the next operation without letting go of their cores. That is right where the same thread has the next operation. Where
other threads go on, as replicas of a module do, they find their cores taken: a forward pass of 26 ms took 35.
"""

from __future__ import annotations

from evenstep.ground.compat.c_library import libc

_SOFT = 1  # omp_pause_soft, of omp.h: what the program can see stays as it is


def rest_team() -> None:
    """Release the cores of the calling thread's OpenMP team; its next operation makes another one.

    Ends with the team's threads: a tenth of a millisecond, and twice that for the next operation. Does nothing where
    there is no team, or the runtime is older than OpenMP 5.
    """
    pause = libc.function("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)
