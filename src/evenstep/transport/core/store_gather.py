"""Messages through the rendezvous store, for ranks that have no transport yet. Opens no socket."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from evenstep.errors import CollectiveTimeoutError

_LOOK_OFTEN_S, _POLL_EVERY_S = 0.05, 0.0003


class StoreGather:
    """The only collective that ranks need to agree on a transport (see `object_collectives.exchange`).

    Collective: every rank makes one, and makes the same calls in the same order.

    Args:
        store: A store that all ranks can reach. A later `StoreGather` on the same store never reads an earlier one's
            values.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Deadline for the other ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, timeout_s: float) -> None:
        # Add a number, because torch gives a new group the name of a destroyed group.
        count = store.add(f"meetings of rank {rank}", 1)
        self._store: Any = PrefixStore(f"meeting {count}/", store)  # torch's stub doesn't allow bytes as values
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._num_calls = 0

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank. Waits for all ranks.

        Raises:
            CollectiveTimeoutError: A rank has not sent its bytes in time.
        """
        self._num_calls += 1
        keys = [f"{self._num_calls}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)
        # Poll more often at first: a `FileStore`'s `wait` polls a hundred times a second, and ranks that make a group
        # usually arrive at the same time.
        end = time.monotonic() + _LOOK_OFTEN_S
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(_POLL_EVERY_S)
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not missing:
                raise
            who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
            raise CollectiveTimeoutError(f"{who} not come within {self._timeout_s:g} s") from error
        return [bytes(each) for each in self._store.multi_get(keys)]

    def among(self, ranks: Sequence[int]) -> StoreGather:
        """Make a `StoreGather` of some of these ranks. Collective among them."""
        store = PrefixStore(f"among {','.join(map(str, ranks))}/", self._store)
        return StoreGather(store, ranks.index(self.rank), len(ranks), timeout_s=self._timeout_s)
