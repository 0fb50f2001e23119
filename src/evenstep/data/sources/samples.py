"""`SampleSource`: the batches of a data set whose samples are numbered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loading.fetch import Fetcher, Loaded, SampleFetcher
from evenstep.data.order.batch_plan import BatchPlan, ComputedEpoch, Epoch, Request
from evenstep.data.order.drawn import Drawing
from evenstep.data.position import Mark
from evenstep.data.sources.same_data import SameData
from evenstep.data.sources.same_stream import ENDED, Agreement, who_differs
from evenstep.data.sources.source import Source
from evenstep.errors import MismatchError, UsageError
from evenstep.ground.computing.randomness import OwnStreams
from evenstep.transport.local import LocalTransport
from evenstep.world import World


class BatchesToTake(Protocol):
    """Divides global batches over processes. Each takes one batch after the other, at its own speed."""

    def take(
        self,
        epoch: int,
        num_batches: int,
        facts: Mapping[str, Any],
        load: Callable[[Iterator[tuple[int, int]]], Iterator[tuple[Mark, Loaded]]],
    ) -> Iterator[tuple[Mark, Loaded]]:
        """Yield the batches of this process; `load` loads batches, given by epoch and step."""
        ...


class SampleSource(Source):
    """Numbered samples, divided over ranks by a `BatchPlan`."""

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        sample_seed: bool,
        num_workers: int,
        world: World,
        queue: BatchesToTake | None = None,
    ) -> None:
        fetcher = SampleFetcher(
            dataset,
            collate_fn,
            seed=plan.seed,
            num_workers=num_workers,
            world=world,
            sample_seed=plan.seed if sample_seed else None,
        )
        super().__init__(dataset, world, plan.global_batch_size, fetcher)
        self.plan, self._queue = plan, queue
        self._newest: tuple[int, Epoch | None] = 0, None  # number and epoch of the iteration begun last
        self._same_data = SameData()

    def load_with(self, fetcher: Fetcher) -> Callable[[Request], Loaded]:
        """See `Source.load_with`. Samples of different ranks draw different numbers, also before a model is trained.

        Otherwise every rank would augment its first batch in the same way. The script's own streams stay equal until a
        model is trained.
        """

        def load(request: Request) -> Loaded:
            if fetcher.wants_tensors or not self.world.draws_alike:
                return fetcher[request]
            with OwnStreams(fetcher.key_of(request)).in_use():
                return fetcher[request]

        return load

    def facts(self) -> dict[str, Any]:
        """See `Source.facts`."""
        return self.plan.facts()

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        return self.plan.num_steps(epoch)

    def describe(self, epoch: int) -> str:
        """See `Source.describe`."""
        return self.plan.describe(epoch)

    def step_at(self, mark: Mark) -> int | None:
        """See `Source.step_at`."""
        if self.plan.sampling is not None:
            return 0
        return self.plan.epoch(mark.epoch, mark.position).step_at(mark.position)

    def position_of(self, epoch: int, step: int) -> int:
        """See `Source.position_of`."""
        present = self.plan.epoch(epoch)
        return present.global_batch(step)[0] if step < present.num_batches else present.global_batch(step - 1)[1]

    def after(self, epoch: int) -> Mark:
        """See `Source.after`. The state of a sampler continues from there."""
        latest = self._newest[1]
        return Mark(epoch + 1, drawn=latest.last if isinstance(latest, Drawing) else None)

    def validate(self) -> None:
        """Raise if the data have changed since the loader was made.

        Raises:
            UsageError: The data set has another length.
        """
        planned = self.plan.num_samples
        if len(self.dataset) != planned:
            raise UsageError(
                f"DataLoader on rank {self.world.rank}: the data set had {planned} samples when the loader was made "
                f"and has {len(self.dataset)} now. Make a new loader, on every rank."
            )

    def batches(
        self, start: Mark, iteration: int, torch_loader: TorchDataLoader[Any] | None
    ) -> Iterator[tuple[Mark, Loaded]]:
        """See `Source.batches`."""
        if self._queue is not None:
            yield from self._taken(self._queue, start.epoch, torch_loader)
            return
        epoch = self.plan.begin(start)
        if iteration >= self._newest[0]:
            self._newest = iteration, epoch
        agreement = Agreement(self.transport if self.plan.is_compared else LocalTransport())
        self._validate_start(agreement, epoch, start)
        marks: deque[Mark] = deque()
        if isinstance(epoch, Drawing):
            wanted = self._drawn(epoch, marks, agreement)
        else:
            as_tensors = torch_loader is None and self.fetcher.wants_tensors
            wanted = self._computed(epoch, start, marks, as_tensors=as_tensors)
        has_digests = self._same_data.begins(self.transport.world_size)
        if has_digests:
            wanted = chain((first._replace(has_digests=True) for first in islice(wanted, 1)), wanted)
        with self.loading(wanted, torch_loader, partial(self._doing, epoch)) as batches:
            for loaded in batches:
                self._validate_same(agreement, epoch)
                if has_digests and loaded.digests:
                    self._same_data.start(loaded.digests, self.transport)
                self._same_data.poll()
                yield marks.popleft(), loaded
        self._validate_same(agreement, epoch)

    def _validate_start(self, agreement: Agreement, epoch: Epoch, start: Mark) -> None:
        """Raise on all ranks unless they have drawn the same samples as each other and as the run that saved the state.

        Collective.
        """
        expected = (start.drawn or {}).get("digest")
        is_wrong = epoch.is_wrong if isinstance(epoch, Drawing) else expected not in (None, epoch.digest)
        agreement.add(epoch.digest, is_wrong=is_wrong)
        of_ranks = agreement.compare_oldest()
        if of_ranks is None:
            return
        if not any(is_wrong for _, is_wrong in of_ranks):
            raise self._differ([digest for digest, _ in of_ranks], f"At the beginning of epoch {start.epoch}")
        where = f"DataLoader: the state is that of epoch {start.epoch}, position {start.position}"
        if not isinstance(epoch, Drawing):
            raise UsageError(
                f"{where}, with other weights than the sampler has now. Restore the weights before the epoch begins, "
                f"or continue with the next: loader.set_epoch({start.epoch + 1})."
            )
        raise UsageError(
            f"{where}, and up to there {self._sampler} gives other samples than in the run that saved it: "
            f"its draws depend on its own state, such as a generator or a counter. Give it set_epoch(epoch), which the "
            f"loader calls, and let its draws depend on the epoch; or give it state_dict and load_state_dict, and its "
            f"state is saved with the loader's. Nothing was loaded."
        )

    def _validate_same(self, agreement: Agreement, epoch: Epoch) -> None:
        """Raise on all ranks unless all have drawn the same next step, or all have ended. Collective."""
        of_ranks = agreement.compare_oldest() if isinstance(epoch, Drawing) else None
        if of_ranks is not None:
            raise self._differ([digest for digest, _ in of_ranks], f"In epoch {epoch.number}")

    def _differ(self, digests: list[int], where: str) -> MismatchError:
        return MismatchError(
            f"DataLoader: {self._sampler} isn't the same on all ranks. {where}, "
            f"{who_differs(digests, ENDED, 'samples')}. Every rank draws the whole order and loads its part, so some "
            f"samples would come twice and others never. A sampler must not divide by rank, and its weights, losses or "
            f"lengths must be equal on all ranks: use world.gather and world.mean."
        )

    @property
    def _sampler(self) -> str:
        sampling = self.plan.sampling
        return "the sampler by weight" if sampling is None else sampling.in_words()

    def _taken(
        self, queue: BatchesToTake, number: int, torch_loader: TorchDataLoader[Any] | None
    ) -> Iterator[tuple[Mark, Loaded]]:
        """Requests for the whole global batches that this process takes from a queue."""

        def load(steps: Iterator[tuple[int, int]]) -> Iterator[tuple[Mark, Loaded]]:
            marks: deque[Mark] = deque()

            def wanted() -> Iterator[Request]:
                for of_epoch, step in steps:
                    epoch = self.plan.epoch(of_epoch)
                    begin, end = epoch.global_batch(step)
                    samples: Any = epoch.at(torch.arange(begin, end, device="cpu"))
                    marks.append(Mark(number, end))
                    as_tensor = torch_loader is None and self.fetcher.wants_tensors
                    yield Request(of_epoch, step, samples if as_tensor else samples.tolist())

            with self.loading(wanted(), torch_loader, partial(self._doing, None)) as batches:
                for loaded in batches:
                    yield marks.popleft(), loaded

        digest = self.plan.begin(Mark(number)).digest
        facts = self.facts() | ({"weights": digest} if digest else {})
        yield from queue.take(number, self.num_steps(number), facts, load)

    def _computed(
        self, epoch: ComputedEpoch, start: Mark, marks: deque[Mark], *, as_tensors: bool
    ) -> Iterator[Request]:
        """This rank's requests; `marks` gets the position at the end of each."""
        step, done = epoch.step_at(start.position) or 0, self.done.get(epoch.number, ())
        drawn = {"digest": epoch.digest} if epoch.digest else None
        for request in epoch.requests(step, self.fetcher.share, as_tensors=as_tensors):
            if request.step not in done:
                marks.append(Mark(epoch.number, epoch.global_batch(request.step)[1], drawn=drawn))
                yield request

    def _drawn(self, drawing: Drawing, marks: deque[Mark], agreement: Agreement) -> Iterator[Request]:
        """This rank's requests from a sampler. The drawn indices are compared before their batch is yielded."""
        while (found := drawing.draw()) is not None:
            indices, mark = found
            agreement.add(drawing.digest)
            marks.append(mark)
            start, stop = self.fetcher.share(0, len(indices))
            example = None if stop > start else indices[0]
            yield Request(drawing.number, drawing.num_batches - 1, indices[start:stop], example)
        agreement.add(ENDED)

    def _doing(self, epoch: Epoch | None, of_epoch: int, step: int, number: int) -> str:
        """The sample that a worker was loading, according to its notes.

        Args:
            epoch: The iterated epoch; None: batches of several epochs are loaded, as with a queue.
            of_epoch: Number of the batch's epoch.
            step: Number of the batch in its epoch.
            number: Number of the sample in this rank's share.
        """
        epoch = epoch or self.plan.epoch(of_epoch)
        start, stop = epoch.global_batch(step)
        if isinstance(epoch, Drawing):
            samples = epoch.indices(step)[slice(*self.fetcher.share(0, stop - start))]
        else:
            samples = epoch.at(torch.arange(*self.fetcher.share(start, stop), device="cpu")).tolist()
        where = f"epoch {epoch.number}, step {step}"
        if self.fetcher.notes_samples and number < len(samples):
            return f"sample {samples[number]} ({where}, number {number} of this rank's {len(samples)})"
        some = ", ".join(map(str, islice(samples, 8)))
        return f"samples {some}{', ...' if len(samples) > 8 else ''} ({where})"

    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """See `Source.gather`."""
        assert self._newest[1] is not None
        return self._gathered(rows, self._newest[1], start.position, end.position)
