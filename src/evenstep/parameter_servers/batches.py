"""One loader's batches, divided over the workers of a run: `ps.queue()`, for `DataLoader(queue=)`."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from evenstep.data.loading.fetch import Loaded
from evenstep.errors import MismatchError, UsageError
from evenstep.parameter_servers.deciding.batch_queue import Batch, Pass
from evenstep.parameter_servers.worker import Servers

Step = tuple[int, int]  # an epoch, and the number of a batch in it
Load = Callable[[Iterator[Step]], Iterator[tuple[Any, Loaded]]]


class SharedBatches:
    """A loader's batches, divided over workers; the result of `ParameterServer.queue`.

    Args:
        servers: Returns the connection, as long as there is one.
        step: Makes a step without samples for this worker; None: workers don't wait for each other's steps.
        number: The number of this loader among the worker's loaders.
        prefetch: Called with each batch one step before the loop gets it; None: no batch is taken ahead.
    """

    def __init__(
        self,
        servers: Callable[[], Servers],
        step: Callable[[], None] | None,
        number: int,
        prefetch: Callable[[Any], object] | None,
    ) -> None:
        self._servers, self._step, self._number, self._prefetch = servers, step, number, prefetch
        self._num_passes: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<SharedBatches {self._number}>"

    def take(self, epoch: int, num_batches: int, facts: Mapping[str, Any], load: Load) -> Iterator[tuple[Any, Loaded]]:
        """Yield this worker's batches of an epoch. Each is taken on demand, or as far ahead as `load` reads.

        In "sync", a worker without a batch takes part in the others' steps until all batches are done. In the other
        modes its loop ends at once.

        Args:
            epoch: Number of the epoch.
            num_batches: The batches of the epoch.
            facts: Values that decide which samples a batch has, in JSON types.
            load: Loads batches, given by epoch and number in the epoch, in order. A batch that another worker gave back
                late may be of an earlier epoch.

        Yields:
            The items of `load`.

        Raises:
            MismatchError: Another worker's loader has other batches.
            PeerLostError: A server has gone, or another worker failed.
            UsageError: Not inside the `with` statement; or, with `prefetch`, the loop made no step for a batch.
        """
        servers, text = self._servers(), json.dumps(facts, sort_keys=True)
        # Continue a pass that was left early, as after reading one batch: a new pass would repeat the whole epoch.
        wanted: Pass = (self._number, epoch, self._num_passes[epoch])
        taken: deque[Batch] = deque()  # taken and not yielded yet
        last: dict[str, Any] = {}

        def take() -> Iterator[Step]:
            while (batch := self._take(wanted, num_batches, text, last)) is not None:
                taken.append(batch)
                yield batch[0][1], batch[1]

        yielded: Batch | None = None
        try:
            while True:
                steps = take()
                if (first := next(steps, None)) is not None:
                    for loaded in self._ahead(load(chain([first], steps))):
                        yielded = taken.popleft()
                        servers.begun.append(yielded)
                        yield loaded
                        yielded = None
                if last["is_over"] or self._step is None:
                    self._num_passes[epoch] += 1
                    return
                self._step()
        finally:
            # The loop was left before the step of the yielded batch, or with batches taken ahead.
            servers.give_back([*([] if yielded is None else [yielded]), *taken])

    def _take(self, wanted: Pass, num_batches: int, facts: str, last: dict[str, Any]) -> Batch | None:
        servers = self._servers()
        last |= servers.first("take", wanted=wanted, num_batches=num_batches, facts=facts)
        if last["differs"]:
            raise MismatchError(f"{servers.who}: {last['differs']}")
        if last["batch"] is None:
            return None
        (loader, epoch, iteration), number = last["batch"]
        return (loader, epoch, iteration), number

    def _ahead(self, batches: Iterator[tuple[Any, Loaded]]) -> Iterator[tuple[Any, Loaded]]:
        """Yield each batch when the next one is loaded; call `prefetch` with each as soon as it is loaded."""
        if self._prefetch is None:
            yield from batches
            return
        present = next(batches, None)
        while present is not None:
            coming = next(batches, None)
            if coming is not None:
                self._prefetch(coming[1].batch)
            num_pushes = self._servers().num_pushes
            yield present
            if coming is not None and self._servers().num_pushes != num_pushes + 1:
                raise UsageError("ps.queue(prefetch=): call ps.step once for each batch of the loop.")
            present = coming
