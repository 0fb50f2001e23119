"""What a rank reads: loaders, batches, samples and random streams. Epochs end early, so that two begin."""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, get_worker_info

from evenstep import randomness
from evenstep.data.loader import DataLoader
from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_data import MapDatasetFetcher
from evenstep.tools.doctor.run.events import Place
from evenstep.tools.doctor.run.recorder import Recorder
from evenstep.tools.observing.loaders import LoaderWatch, WatchedIteration
from evenstep.tools.observing.patching import Patches
from evenstep.tools.verify.evidence import digest

_MOST_ROWS = 64  # of a batch of which digests are kept
_MOST_EVALUATED = 8  # batches of a loop that makes no step
_MOST_FETCHES = 4  # of a worker


class Loaders(LoaderWatch):
    """Notes what loops over loaders read, and ends them early."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(lambda began, ended: None, lambda: recorder.num_steps)
        self._recorder = recorder
        self._known: list[Any] = []
        self._made: dict[int, list[Place]] = {}
        self._iterations: dict[int, int] = {}
        self._numbers: dict[int, tuple[int, int]] = {}
        # An epoch for each half of the steps.
        self._steps_of_epoch = max(1, -(-recorder.plan.num_steps // 2))

    def install(self, patches: Patches) -> None:
        """Watch all loaders of this process, until the patches are undone."""
        super().install(patches)
        for kind in (TorchDataLoader, DataLoader):
            patches.replace(kind, "__init__", self._making)

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            places = self._recorder.places()
            if places:
                self._made[id(loader)] = places
            original(loader, *args, **kwargs)

        return init

    def began(self, iteration: WatchedIteration) -> None:
        """Note the loader, and the data set of one that is new."""
        loader = iteration.loader
        number = next((i for i, each in enumerate(self._known) if each is loader), len(self._known))
        if number == len(self._known):
            self._known.append(loader)
        self._iterations[number] = self._iterations.get(number, -1) + 1
        self._numbers[id(iteration)] = number, self._iterations[number]
        facts = _facts(loader) if self._iterations[number] else _facts(loader) | _first_looks(loader)
        epoch = getattr(getattr(loader, "sampler", None), "epoch", None)
        count, made = self._iterations[number], self._made.get(id(loader), [])[:1]
        self._recorder.note("iterate", loader=number, iteration=count, epoch=epoch, made=made, **facts)

    def is_cut(self, iteration: WatchedIteration) -> bool:
        """End an epoch after its share of the steps, where its loop can tell an end from a failure."""
        made = self.num_steps() - iteration.steps_before
        if self._recorder.is_over:
            enough = iteration.num_batches >= 1
        elif made:
            enough = made >= self._steps_of_epoch
        else:
            enough = iteration.num_batches >= _MOST_EVALUATED and self.num_steps() > 0
        return enough and self._is_in_a_for()

    def read(self, iteration: WatchedIteration, item: Any) -> None:
        """Note digests of the samples."""
        number, count = self._numbers[id(iteration)]
        rows = row_digests(item)
        self._recorder.write("batch", [], {"loader": number, "iteration": count, "rows": rows, "count": self.last_rows})

    def ended(self, iteration: WatchedIteration, *, is_cut: bool) -> None:
        """Note the end of a loop."""
        number, count = self._numbers.pop(id(iteration), (-1, -1))
        facts = {"loader": number, "iteration": count, "num_batches": iteration.num_batches, "cut": is_cut}
        self._recorder.write("iterated", [], facts)

    def goes_on(self, iteration: WatchedIteration) -> bool:
        """Epochs end as they do."""
        return False

    def _is_in_a_for(self) -> bool:
        """Whether a `for` asks for the next batch, or a library; `next` in the script may not expect an end."""
        frame = sys._getframe(3)  # of whoever has called __next__
        if not self._recorder.own_file(frame.f_code.co_filename):
            return True
        return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"


def _facts(loader: Any) -> dict[str, Any]:
    """Of a loader, as far as it has them."""
    sampler, dataset = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    is_stream = isinstance(dataset, IterableDataset)
    return {
        "library": type(loader).__module__.partition(".")[0],
        "is_plain": type(loader) is TorchDataLoader,
        "dataset": id(dataset),
        "is_stream": is_stream,
        "num_samples": None if is_stream else _length(dataset),
        "sampler": type(sampler).__name__,
        "is_whole": type(sampler) in (RandomSampler, SequentialSampler) and type(batches).__name__ == "BatchSampler",
        "is_shuffled": isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False)),
        "of_rank": None if is_stream else _length(sampler),
        "padded_to": getattr(sampler, "total_size", None),
        "is_distributed": hasattr(sampler, "num_replicas"),
        "num_workers": getattr(loader, "num_workers", 0),
        "batch_size": getattr(loader, "batch_size", None),
        "num_batches": _length(loader),
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _first_looks(loader: Any) -> dict[str, Any]:
    """Digests of three samples, drawn with the same random numbers on every rank: is it the same data set?"""
    dataset: Any = getattr(loader, "dataset", None)
    count = _length(dataset)
    if isinstance(dataset, IterableDataset) or not count or type(loader) is not TorchDataLoader:
        return {}
    looks: list[str] = []
    # Whatever a data set raises here, it raises again where the script reads it.
    with contextlib.suppress(Exception), randomness.preserved():
        for index in (0, count // 2, count - 1):
            twice = []
            for _ in range(2):  # a data set that draws from a generator of its own looks otherwise each time
                randomness.seed_streams(randomness.mix(index))
                twice.append(_leaf_digests(dataset[index]))
            looks += twice[0] if twice[0] == twice[1] else []
    return {"looks": looks}


def row_digests(batch: Any) -> list[str]:
    """A digest of each sample of a batch: of all tensors that have a row for it."""
    tensors = [leaf.detach() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors or any(leaf.requires_grad for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)):
        return []
    alike = [each[:_MOST_ROWS] for each in tensors if len(each) == len(tensors[0])]
    return [_short("".join(digest(row) for row in rows)) for rows in zip(*alike, strict=True)]


def _leaf_digests(sample: Any) -> list[str]:
    leaves = pytree.tree_leaves(sample)
    return [digest(leaf) if isinstance(leaf, Tensor) else _short(repr(leaf)) for leaf in leaves]


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---------------------------------------------------------------------- random streams of data sets


def watch_fetches(patches: Patches, recorder: Recorder) -> None:
    """Note which random streams move where samples are loaded, in the rank and in forked workers."""
    counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def fetched(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fetch(self: Any, index: Any) -> Any:
            worker = get_worker_info()
            number = -1 if worker is None else worker.id
            counts[self] = counts.get(self, 0) + 1
            if counts[self] > _MOST_FETCHES:
                return original(self, index)
            before = _streams(self.dataset)
            batch = original(self, index)
            after = _streams(self.dataset)
            moved = {name: state for name, state in before.items() if after.get(name) != state}
            facts = {"worker": number, "dataset": id(self.dataset), "number": counts[self] - 1, "streams": moved}
            recorder.write("fetch", [], facts)
            return batch

        return fetch

    patches.replace(MapDatasetFetcher, "fetch", fetched)


def _streams(dataset: Any) -> dict[str, str]:
    """Digests of the states of all random streams that a data set may draw from."""
    found = {
        "torch": digest(torch.get_rng_state()),
        "random": _short(repr(random.getstate())),
        "numpy": _short(repr(numpy.random.get_state())),
    }
    for name, stream in _own_streams(dataset, depth=3):
        if isinstance(stream, torch.Generator):
            found[name] = digest(stream.get_state())
        elif isinstance(stream, random.Random):
            found[name] = _short(repr(stream.getstate()))
        else:
            state = stream.bit_generator.state if isinstance(stream, numpy.random.Generator) else stream.get_state()
            found[name] = _short(repr(state))
    return found


def _own_streams(thing: Any, depth: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The generators that an object holds, or objects that it holds."""
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        kinds = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)
        if isinstance(value, kinds):
            yield f"self.{prefix}{name}", value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type | Tensor):
            yield from _own_streams(value, depth - 1, f"{prefix}{name}.")
