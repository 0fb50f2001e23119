"""A collective that an exception interrupts (Ctrl-C, a signal's handler) ends in right sums or an error, on all ranks.

`python -m tests.faults.test_interrupts 1000` plays as many interrupts at random moments.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys

import torch

import evenstep
from evenstep.errors import EvenstepError
from evenstep.testing import RankPool
from evenstep.transport.shm.handshake import connect_shared_memory
from evenstep.transport.shm.transport import SharedMemoryTransport

NUM_CALLS = 60


class Interrupted(Exception):
    """What a handler of the user's raises."""


def connect() -> SharedMemoryTransport:
    made = connect_shared_memory(evenstep.init(quiet=True).control, timeout_s=10)
    assert isinstance(made, SharedMemoryTransport), made
    return made


def add_until_an_error(transport: SharedMemoryTransport, numels: list[int]) -> str | None:
    """Call all_reduce again and again, also after an `Interrupted`; the error that ended it. Wrong sums raise."""
    size, rank = transport.world_size, transport.rank
    while (number := transport.num_calls) < NUM_CALLS:
        numel = numels[number]
        tensor = torch.full((numel,), float(number * size + rank))
        try:
            transport.all_reduce(tensor).wait()
        except Interrupted:
            continue
        except EvenstepError as error:
            return str(error)
        if transport.num_calls == number + 1:  # else the interrupt came behind the launch
            expected = float(sum(number * size + each for each in range(size)))
            assert tensor.eq(expected).all(), (rank, number, numel, tensor.unique().tolist(), expected)
    return None


def interrupt_at_random_moments(seed: int, num_interrupts: int) -> int:
    """Returns how many of them ended in an error. Rank 1 is interrupted by a timer's handler, the others aren't."""
    world, rng, num_errors = evenstep.init(quiet=True), random.Random(seed), 0

    def handle(*_: object) -> None:
        raise Interrupted

    for each in range(num_interrupts):
        transport = connect()
        numels = [rng.choice([1, 5, 20_000, 300_000]) if each % 2 else 5 for _ in range(NUM_CALLS)]
        after_s = rng.uniform(1e-5, 3e-3)
        before = signal.signal(signal.SIGALRM, handle)
        try:
            with contextlib.suppress(Interrupted):  # it may come before the first call, or behind the last
                if world.rank == 1:
                    signal.setitimer(signal.ITIMER_REAL, after_s)
                num_errors += add_until_an_error(transport, numels) is not None
            assert torch.is_grad_enabled(), "a call that was interrupted has left gradients off"
        finally:
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            transport.close()
    return num_errors


def test_an_exception_at_any_moment_gives_right_sums_or_an_error(ranks: RankPool) -> None:
    seed = random.randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")
    ranks.run(interrupt_at_random_moments, 2, seed, 40)


def main(num_interrupts: int) -> None:
    """Play them on two and on three ranks."""
    for nproc in (2, 3):
        seed = random.randrange(2**32)
        with RankPool() as pool:
            errors = pool.run(interrupt_at_random_moments, nproc, seed, num_interrupts // 2)
        text = f"{nproc} ranks, seed {seed}: {num_interrupts // 2} interrupts, of which {errors[1]} ended in an error"
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
