"""All-gather through the rendezvous store: what ranks have before they have a transport. No socket is opened for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from evenstep.errors import CollectiveTimeoutError
from evenstep.transport.base import Work
from evenstep.transport.core.codec import to_bytes, to_tensor


class _Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class StoreGather:
    """The one collective that ranks need to agree on a transport (see `object_collectives.exchange`).

    Collective: every rank makes one, and makes the same calls in the same order.

    Args:
        store: Which all of them reach. When they meet there again, it isn't for the values of the time before.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Deadline for the others to come.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, timeout_s: float) -> None:
        # Counted, because torch names a group that follows a destroyed one as that one.
        count = store.add(f"meetings of rank {rank}", 1)
        self._store: Any = PrefixStore(f"meeting {count}/", store)  # torch's stub has no bytes as values
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._num_calls = 0

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`. Returns when all is there.

        Raises:
            CollectiveTimeoutError: A rank has not come.
        """
        self._num_calls += 1
        keys = [f"{self._num_calls}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], to_bytes(tensor.view(torch.uint8)))
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not missing:
                raise
            who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
            raise CollectiveTimeoutError(f"{who} not come within {self._timeout_s:g} s") from error
        out.view(torch.uint8).copy_(to_tensor(b"".join(self._store.multi_get(keys))))
        return _Done()

    def among(self, ranks: Sequence[int]) -> StoreGather:
        """The same between some of these ranks. Collective among them."""
        store = PrefixStore(f"among {','.join(map(str, ranks))}/", self._store)
        return StoreGather(store, ranks.index(self.rank), len(ranks), timeout_s=self._timeout_s)
