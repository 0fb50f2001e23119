"""Ends the threads of torch's CPU operations that wait for the next operation in a busy loop.

[Note: a team that spins]

After an operation in several threads, the threads of its OpenMP team spin for some milliseconds, waiting for the next
operation, and occupy their cores. That is good if the same thread starts the next operation. But if other threads
compute next, such as those of a module's replicas, they find the cores occupied: a forward pass of 26 ms took 35 ms.
"""

from __future__ import annotations

from evenstep.ground.compat.c_library import libc

_SOFT = 1  # omp_pause_soft, of omp.h: the program's visible state is kept


def rest_team() -> None:
    """Release the cores of the calling thread's OpenMP team; its next operation makes another one.

    The team's threads end: this costs a tenth of a millisecond, and twice that at the next operation. Does nothing if
    there is no team, or the runtime is older than OpenMP 5.
    """
    pause = libc.function("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)
