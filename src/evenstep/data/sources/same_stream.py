"""Comparison of each step's records between ranks, before the step is yielded.

A stream that is divided by record is read by every worker of every rank, and each loads its part. If a worker gets the
records in another order, some records come twice and others never, without a message. So every process makes a digest
of the records of each step. Each worker makes digests of the other workers' steps, too, and the rank compares them. In
every step the ranks compare their digests. The indices of a sampler, which every rank draws, are compared in the same
way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from evenstep.data.loading.digests import digest_of
from evenstep.data.loading.fetch import Loaded
from evenstep.errors import MismatchError
from evenstep.transport.core.transport import Transport

ENDED = -1  # instead of a digest: there is no further step
_ADVICE = (
    "Every rank and every worker reads the whole stream and loads its part, so some records would come twice and "
    "others never. While the stream runs, python's, torch's and numpy's random numbers are keyed by (seed, epoch); "
    "its own random generators must be keyed so, too (its set_epoch(epoch) is called), and files and sets must come in "
    "a fixed order (sorted). Put random changes of single records into collate_fn."
)


class Agreement:
    """Compares a digest of each step between the ranks.

    Each comparison runs when its step is about to be yielded, not when the step is drawn: ranks draw ahead by different
    numbers of steps (their loaders may have other numbers of workers), and a loop that is left early would leave
    different numbers of comparisons behind.

    Args:
        transport: A transport that only these comparisons use.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiting: deque[Tensor] = deque()  # [2] each: the digest, and whether this rank has found something wrong

    def add(self, digest: int, *, is_wrong: bool = False) -> None:
        """Add the digest of the next step, in order."""
        self._waiting.append(torch.tensor([digest, is_wrong], dtype=torch.int64, device="cpu"))

    def compare_oldest(self) -> list[tuple[int, bool]] | None:
        """Compare the oldest digest. Returns each rank's (digest, is_wrong), or None if all agree. Collective."""
        found = torch.empty(self._transport.world_size, 2, dtype=torch.int64, device="cpu")
        self._transport.all_gather(found.view(-1), self._waiting.popleft()).wait()
        if bool((found == found[0]).all()) and not found[0, 1]:
            return None
        return [(digest, bool(is_wrong)) for digest, is_wrong in found.tolist()]


def who_differs(digests: Sequence[int], ended: int, what: str) -> str:
    """The first rank that differs from rank 0, and how. Pure.

    Args:
        digests: The ranks' digests.
        ended: The value that means that there is no further step.
        what: A word for the message, such as "records".
    """
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    for rank, goes_on in ((0, other), (other, 0)):
        if digests[rank] == ended:
            return f"it has ended on rank {rank} and continues on rank {goes_on}"
    return f"rank {other} got other {what} than rank 0"


def same_everywhere(
    batches: Iterator[Loaded], transport: Transport, epoch: int, first_step: int, num_workers: int
) -> Iterator[Loaded]:
    """Yield batches while all processes have the same records, and then the last batch, which marks the stream's end.

    Collective: every rank iterates, in step.

    Args:
        batches: This rank's batches, with digests; endless after the stream's end.
        transport: A transport that only these comparisons use.
        epoch: For messages.
        first_step: The step of the first batch.
        num_workers: Workers of this rank; at least 1.

    Raises:
        MismatchError: A process has other records. Raised on all ranks.
    """
    agreement = Agreement(transport)
    seen: dict[int, int] = {}  # digests of the latest steps, from the first worker that loaded each
    for step, loaded in enumerate(batches, first_step):
        others = enumerate(reversed(loaded.digests))
        workers_differ = any(seen.setdefault(step - back, digest) != digest for back, digest in others)
        seen.pop(step - num_workers, None)
        agreement.add(loaded.digests[-1], is_wrong=workers_differ)
        of_ranks = agreement.compare_oldest()
        if of_ranks is not None:
            rank = next((rank for rank, (_, is_wrong) in enumerate(of_ranks) if is_wrong), None)
            who = f"the workers of rank {rank} got different records"
            if rank is None:
                who = who_differs([digest for digest, _ in of_ranks], digest_of([]), "records")
            raise MismatchError(
                f"DataLoader: the stream isn't the same in all processes. In epoch {epoch}, step {step}, {who}. "
                f"{_ADVICE}"
            )
        yield loaded
        if not loaded.num_samples:
            return
