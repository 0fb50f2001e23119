"""`SampleSource`: the batches of a data set whose samples are numbered."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loading import workers
from evenstep.data.loading.fetch import Fetcher, Loaded
from evenstep.data.order.batch_plan import BatchPlan, Epoch, FixedBatches, Request, divide, requests
from evenstep.data.order.drawn import Drawing
from evenstep.data.order.permutation import EpochOrder
from evenstep.data.position import Mark
from evenstep.data.sources.same_data import SameData
from evenstep.data.sources.same_stream import ENDED, Agreement, who_differs
from evenstep.data.sources.source import gather_in_order
from evenstep.errors import MismatchError, UsageError
from evenstep.randomness import mix
from evenstep.replica.channels import channel_of
from evenstep.transport.core.transport import Transport
from evenstep.transport.local import LocalTransport
from evenstep.virtual_ranks import per_rank
from evenstep.world import World


class BatchesToTake(Protocol):
    """Divides global batches over processes that take one after the other, each at its own speed."""

    def take(
        self,
        epoch: int,
        num_batches: int,
        facts: Mapping[str, Any],
        load: Callable[[Iterator[tuple[int, int]]], Iterator[tuple[int, Loaded]]],
    ) -> Iterator[tuple[int, Loaded]]:
        """The batches of this process, which `load` loads by epoch and step."""
        ...


class SampleSource:
    """Numbered samples, divided over ranks by a `BatchPlan`."""

    def __init__(
        self,
        dataset: Any,
        batch_plan: BatchPlan,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        sample_seed: bool,
        skip: bool,
        num_workers: int,
        world: World,
        queue: BatchesToTake | None = None,
    ) -> None:
        self._queue = queue
        self.done: dict[int, frozenset[int]] = {}
        self.dataset, self.batch_plan, self.world = dataset, batch_plan, world
        self._transport: Transport = LocalTransport()
        self._newest = 0, Epoch(-1, FixedBatches(0, 1), EpochOrder(0))  # number and epoch of the iteration begun last
        self._same_data = SameData()
        self.global_batch_size = batch_plan.global_batch_size
        self._share = partial(
            divide, rank=world.rank, world_size=world.world_size, virtual_ranks=per_rank(world.virtual_ranks)
        )
        key = batch_plan.seed if sample_seed else None
        page = workers.new_page(num_workers)
        # torch's thread pins batches for a GPU; it can't pin tensors inside the bytes.
        packs = world.device.type == "cpu"
        batch_seed = mix(batch_plan.seed, world.rank)
        self.fetcher = Fetcher(
            dataset, collate_fn, batch_seed=batch_seed, sample_seed=key, skip=skip, page=page, packs=packs
        )

    def connect(self) -> None:
        """Collective: open what carries the ranks' messages about this data set, and nothing else."""
        if self.world.transport.world_size > 1:
            self._transport = channel_of(self, self.world, "samples", torch.device("cpu"))

    def facts(self) -> dict[str, Any]:
        """See `Source.facts`."""
        return self.batch_plan.facts()

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        return self.batch_plan.num_steps(epoch)

    def begins_at(self, mark: Mark) -> bool:
        """Whether a step begins there."""
        if self.batch_plan.sampling is not None:
            return True  # only drawing up to there could show otherwise, and does
        return self.batch_plan.epoch(mark.epoch, mark.position).batches.step_at(mark.position) is not None

    def step_at(self, mark: Mark) -> int:
        """See `Source.step_at`."""
        return self.batch_plan.epoch(mark.epoch, mark.position).batches.step_at(mark.position) or 0

    def position_of(self, epoch: int, step: int) -> int:
        """See `Source.position_of`."""
        batches = self.batch_plan.epoch(epoch).batches
        return batches.global_batch(step)[0] if step < batches.num_batches else batches.global_batch(step - 1)[1]

    def validate(self) -> None:
        """Raise if the data have changed since the loader was made.

        Raises:
            UsageError: The data set has another length.
        """
        planned = self.batch_plan.num_samples
        if len(self.dataset) != planned:
            raise UsageError(
                f"DataLoader on rank {self.world.rank}: the data set had {planned} samples when the loader was made "
                f"and has {len(self.dataset)} now. Make a new loader, on every rank."
            )

    def batches(
        self, start: Mark, iteration: int, torch_loader: TorchDataLoader[Any] | None
    ) -> Iterator[tuple[int | Mark, Loaded]]:
        """This rank's batches, each with the position at its end."""
        if self._queue is not None:
            yield from self._taken(self._queue, start.epoch, torch_loader)
            return
        epoch = self.batch_plan.begin(start)
        if iteration >= self._newest[0]:
            self._newest = iteration, epoch
        drawing = epoch.order if isinstance(epoch.order, Drawing) else None
        agreement = Agreement(self._transport)
        if self.batch_plan.is_compared:
            self._validate_start(agreement, epoch, start)
        marks: deque[Mark] = deque()
        if drawing is not None:
            wanted = self._drawn(drawing, marks, agreement)
        else:
            wanted = self._computed(epoch, start, marks, as_tensors=torch_loader is None and self.fetcher.wants_tensors)
        looks = self._same_data.begins(self._transport.world_size)
        if looks:
            wanted = chain((first._replace(looks=True) for first in islice(wanted, 1)), wanted)
        with self._loading(wanted, torch_loader, epoch) as batches:
            for loaded in batches:
                if drawing is not None:
                    self._validate_same(agreement, drawing, epoch.number)
                if looks and loaded.digests:
                    self._same_data.start(loaded.digests, self._transport)
                self._same_data.look()
                yield marks.popleft(), loaded
        if drawing is not None:
            self._validate_same(agreement, drawing, epoch.number)

    def _validate_start(self, agreement: Agreement, epoch: Epoch, start: Mark) -> None:
        """Raise, on all ranks, unless they draw alike and as the run did that was here before. Collective."""
        drawing = epoch.order if isinstance(epoch.order, Drawing) else None
        digest, expected = epoch.digest, (start.drawn or {}).get("digest")
        is_wrong = drawing.is_wrong if drawing is not None else expected not in (None, digest)
        agreement.add(digest if drawing is None else drawing.digest, is_wrong=is_wrong)
        of_ranks = agreement.settle()
        if of_ranks is None:
            return
        if not any(is_wrong for _, is_wrong in of_ranks):
            raise self._differ([digest for digest, _ in of_ranks], f"At the beginning of epoch {start.epoch}")
        where = f"DataLoader: the state is that of epoch {start.epoch}, position {start.position}"
        if drawing is None:
            raise UsageError(
                f"{where}, of other weights than those that the sampler now has. Restore the weights before the epoch "
                f"begins, or go on with the next: loader.set_epoch({start.epoch + 1})."
            )
        raise UsageError(
            f"{where}, and up to there {self._sampler} gives other samples than in the run that saved it: "
            f"it draws by something of its own, such as a generator or a counter. Give it set_epoch(epoch), which the "
            f"loader calls, and have it draw by the epoch; or give it state_dict and load_state_dict, whose state is "
            f"saved with the loader's. Nothing was loaded."
        )

    def _validate_same(self, agreement: Agreement, drawing: Drawing, epoch: int) -> None:
        """Raise, on all ranks, unless they have drawn the same next step, or all none. Collective."""
        of_ranks = agreement.settle()
        if of_ranks is not None:
            raise self._differ([digest for digest, _ in of_ranks], f"In epoch {epoch}")

    def _differ(self, digests: list[int], where: str) -> MismatchError:
        return MismatchError(
            f"DataLoader: {self._sampler} isn't the same everywhere. {where}, "
            f"{who_differs(digests, ENDED, 'samples')}. Every rank draws the whole order and loads its part, so some "
            f"samples would come twice and others never. A sampler doesn't divide by rank, and what it draws by "
            f"(weights, losses, lengths) is the same on all ranks: world.gather and world.mean make it so."
        )

    @property
    def _sampler(self) -> str:
        sampling = self.batch_plan.sampling
        return "the sampler by weight" if sampling is None else sampling.in_words()

    def _taken(
        self, queue: BatchesToTake, number: int, torch_loader: TorchDataLoader[Any] | None
    ) -> Iterator[tuple[int, Loaded]]:
        """The global batches that this process takes from a queue, each whole."""

        def load(steps: Iterator[tuple[int, int]]) -> Iterator[tuple[int, Loaded]]:
            ends: deque[int] = deque()

            def wanted() -> Iterator[Request]:
                for of_epoch, step in steps:
                    epoch = self.batch_plan.epoch(of_epoch)
                    begin, end = epoch.batches.global_batch(step)
                    samples: Any = epoch.order.at(torch.arange(begin, end, device="cpu"))
                    ends.append(end)
                    as_tensor = torch_loader is None and self.fetcher.wants_tensors
                    yield Request(of_epoch, step, samples if as_tensor else samples.tolist())

            with self._loading(wanted(), torch_loader, self.batch_plan.epoch(number)) as batches:
                for loaded in batches:
                    yield ends.popleft(), loaded

        digest = self.batch_plan.begin(Mark(number)).digest
        facts = self.facts() | ({"weights": digest} if digest else {})
        yield from queue.take(number, self.num_steps(number), facts, load)

    @contextlib.contextmanager
    def _loading(
        self, wanted: Iterator[Request], torch_loader: TorchDataLoader[Any] | None, epoch: Epoch
    ) -> Iterator[Iterator[Loaded]]:
        """What was requested, in its order: by this process, or by workers."""
        if torch_loader is None:
            yield map(self.fetcher.__getitem__, wanted)
            return
        with workers.working(torch_loader, wanted, partial(self._doing, epoch)) as batches:
            yield batches

    def _computed(self, epoch: Epoch, start: Mark, marks: deque[Mark], *, as_tensors: bool) -> Iterator[Request]:
        """This rank's requests; `marks` gets the position at the end of each."""
        step, done = epoch.batches.step_at(start.position) or 0, self.done.get(epoch.number, ())
        for request in requests(epoch, step, self._share, as_tensors=as_tensors):
            if request.step not in done:
                drawn = {"digest": epoch.digest} if epoch.digest else None
                marks.append(Mark(epoch.number, epoch.batches.global_batch(request.step)[1], drawn=drawn))
                yield request

    def _drawn(self, drawing: Drawing, marks: deque[Mark], agreement: Agreement) -> Iterator[Request]:
        """The same, as a sampler gives them. Collective: what is drawn is compared."""
        while (found := drawing.draw()) is not None:
            indices, mark = found
            agreement.add(mark.drawn["digest"])
            marks.append(mark)
            start, stop = self._share(0, len(indices))
            yield Request(
                mark.epoch, drawing.num_batches - 1, indices[start:stop], None if stop > start else indices[0]
            )
        agreement.add(ENDED)

    def _doing(self, epoch: Epoch, step: int, number: int) -> str:
        """The sample that a worker was loading, as far as its notes show."""
        samples = self._samples_of(epoch, step)
        where = f"epoch {epoch.number}, step {step}"
        if self.fetcher.notes_samples and number < len(samples):
            return f"sample {samples[number]} ({where}, number {number} of this rank's {len(samples)})"
        some = ", ".join(map(str, islice(samples, 8)))
        return f"samples {some}{', ...' if len(samples) > 8 else ''} ({where})"

    def _samples_of(self, epoch: Epoch, step: int) -> list[Any]:
        start, stop = epoch.batches.global_batch(step)
        if isinstance(epoch.order, Drawing):
            return epoch.order.indices(step)[slice(*self._share(0, stop - start))]
        found: list[Any] = epoch.order.at(torch.arange(*self._share(start, stop), device="cpu")).tolist()
        return found

    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """All ranks' rows in the order of the data set. Collective."""
        epoch, skips = self._newest[1], self.fetcher.skips
        return gather_in_order(self.world, rows, epoch, start.position, end.position, skips=skips)

    def describe(self, epoch: int) -> str:
        """See `Source.describe`."""
        return self.batch_plan.describe(epoch)
