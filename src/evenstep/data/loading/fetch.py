"""Loading one batch: samples of the data set, through `collate_fn`. Runs in the rank, or in its workers.

[Note: small batches as bytes]

torch's loader sends every tensor as a file of shared memory, whose descriptor travels over a socket of its own. That
takes about a millisecond whatever the size; up to about 1 MiB copying through the pipe is faster.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from evenstep import randomness
from evenstep.data.loading.digests import digest_of
from evenstep.data.loading.nested import emptied
from evenstep.data.order.batch_plan import Request
from evenstep.data.order.epochs import Epochs
from evenstep.errors import DataError
from evenstep.ground.compat.torch_data import without_worker_info
from evenstep.ground.health import excepthook
from evenstep.randomness import mix, seed_streams

_BATCH_TAG = 0x6261746368  # "batch": other streams from the same seed stay unrelated
_SAMPLE_TAG = 0x73616D706C65  # "sample"
MAX_BYTES = 524_288  # of all tensors of a batch that is sent as bytes
_MAX_EXAMPLES = 1_000  # samples tried for one that can be loaded


class Loaded(NamedTuple):
    """A batch, and the reasons for missing samples.

    Attributes:
        batch: Result of `collate_fn`.
        packed: The batch as `pack` made it in a worker; `batch` is None then.
        skipped: Why each missing sample could not be loaded.
        num_samples: Of the global batch; known here only for streams.
        digests: Of the records of this batch's step, behind those of the steps before that other workers load; of
            numbered samples, of the request's looks; empty if nothing is to be compared.
        failure: A worker's `DataError`, which torch would bury in tracebacks.
        state: Of the stream at the batch's end, with resume_streams="state".
    """

    batch: Any
    skipped: tuple[str, ...] = ()
    num_samples: int | None = None
    digests: tuple[int, ...] = ()
    failure: DataError | None = None
    packed: bytes | None = None
    state: Any = None


class Fetcher:
    """Loads the batch of a request.

    Args:
        dataset: Has `__getitem__`.
        collate_fn: Makes a batch of a list of samples; None: torch's.
        batch_seed: Key of a worker's random streams, with the epoch and the step: a resume draws what would have been
            drawn. In the rank's own process they are left alone.
        sample_seed: Key of the random streams in `__getitem__`, with the epoch and the sample, in every process; None:
            samples have none of their own.
        skip: Leave samples out whose loading raises `DataError`.
        page: Memory in which workers note their place, [2 * workers]: step and number of the sample in the share.
        packs: Have workers send small batches as bytes.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        batch_seed: int = 0,
        sample_seed: int | None = None,
        skip: bool = False,
        page: Any = None,
        packs: bool = False,
    ) -> None:
        self.dataset = dataset
        self.collate = default_collate if collate_fn is None else collate_fn
        self.wants_tensors = gives_batches(dataset, self.collate)
        self._batch_seed = batch_seed
        self._sample_seed = None if self.wants_tensors else sample_seed  # such a data set draws nothing
        # Whether workers note the sample, and not only the step.
        self.notes_samples = not self.wants_tensors and (
            sample_seed is not None or not hasattr(dataset, "__getitems__")
        )
        self.skips = skip
        self._page = page
        self._packs = packs
        self._epochs = Epochs(dataset)
        self._is_small = False  # whether the latest batch was packed
        self._good: int | None = None  # a sample that could be loaded

    def __getitem__(self, request: Request) -> Loaded:
        """Load a batch. torch's loader takes this object for the data set."""
        worker = get_worker_info()
        if worker is not None:
            if self._page is not None:
                self._page[2 * worker.id : 2 * worker.id + 2] = [request.step, 0]
            if not self.wants_tensors:
                seed_batch(self._batch_seed, request)
            try:
                loaded = packed(self._load(request)) if self._packs else self._load(request)
                self._is_small = loaded.packed is not None
                return loaded
            except DataError as error:
                return failed(error)
        if self._sample_seed is None:
            return self._load(request)
        with randomness.preserved():
            return self._load(request)

    def _load(self, request: Request) -> Loaded:
        self._epochs.tell(request.epoch)
        if request.looks:
            return self._load(request._replace(looks=False))._replace(digests=self._looked())
        if request.example is not None:
            return Loaded(self._nothing_like(request.epoch, request.example))
        if self.wants_tensors:
            try:
                return Loaded(batch_of(self.dataset, torch.as_tensor(request.samples, device="cpu")))
            except DataError:
                if not self.skips:
                    raise
        samples = request.samples.tolist() if isinstance(request.samples, Tensor) else request.samples
        skipped: list[str] = []
        loaded = self._samples(samples, request, skipped)
        if skipped and not loaded:
            return Loaded(self._nothing_like(request.epoch, None), tuple(skipped))
        return Loaded(self._collated(loaded), tuple(skipped))

    def _looked(self) -> tuple[int, int]:
        """Digests of two reads of a few fixed samples; they differ where reads do, or fail."""
        with randomness.preserved():
            try:
                size = len(self.dataset)
                numbers = sorted({0, size // 3, 2 * size // 3, size - 1})
                one, two = (digest_of([self.dataset[number] for number in numbers]) for _ in range(2))
                return one, two
            except Exception:  # of the user's data set: there is no verdict
                return 0, 1

    def _collated(self, loaded: list[Any]) -> Any:
        if self._is_small and self.collate is default_collate:
            # In a worker torch's function would make a file of shared memory for each tensor.
            with without_worker_info():
                return self.collate(loaded)
        return self.collate(loaded)

    def _samples(self, samples: list[int], request: Request, skipped: list[str]) -> list[Any]:
        dataset = self.dataset
        if self._sample_seed is None and getattr(dataset, "__getitems__", None):
            try:
                return list(dataset.__getitems__(samples))
            except DataError:
                if not self.skips:
                    raise
        loaded: list[Any] = []
        note = self._noter()
        sample = None
        try:
            if not self.skips and self._sample_seed is None and get_worker_info() is None:
                for sample in samples:
                    loaded.append(dataset[sample])
                return loaded
            for number, sample in enumerate(samples):
                note(number)
                try:
                    loaded.append(self._sample(sample, request.epoch))
                except DataError as error:
                    if not self.skips:
                        raise
                    skipped.append(f"sample {sample}: {error}")
        except Exception as error:
            if not isinstance(error, DataError) and hasattr(error, "add_note"):  # python 3.11
                error.add_note(f"while evenstep loaded sample {sample}, epoch {request.epoch}, step {request.step}")
            raise
        return loaded

    def _sample(self, sample: int, epoch: int) -> Any:
        if self._sample_seed is not None:
            seed_streams(mix(_SAMPLE_TAG, self._sample_seed, epoch, sample))
        loaded = self.dataset[sample]
        self._good = sample
        return loaded

    def _noter(self) -> Callable[[int], None]:
        worker = get_worker_info()
        if self._page is None or worker is None:
            return lambda number: None
        page, place = self._page, 2 * worker.id + 1
        return lambda number: page.__setitem__(place, number)

    def _nothing_like(self, epoch: int, example: int | None) -> Any:
        """The batch of no samples."""
        num_samples = len(self.dataset)
        candidates = [each for each in (example, self._good) if each is not None]
        for sample in (*candidates, *islice(range(num_samples), _MAX_EXAMPLES if self.skips else 0)):
            try:
                one, two, three = (self._sample(sample, epoch) for _ in range(3))
            except DataError:
                if not self.skips:
                    raise
                continue
            return emptied(self.collate([one]), self.collate([two, three]))
        raise DataError(
            f"none of {min(num_samples, _MAX_EXAMPLES)} samples can be loaded; what a batch looks like isn't known."
        )


def failed(error: DataError) -> Loaded:
    """In place of a batch that a worker can't load: the error, without what doesn't travel between processes."""
    sent = DataError(str(error))
    where = excepthook.traceback_in_users_code(error.__cause__)
    if where and hasattr(sent, "add_note"):  # python 3.11
        sent.add_note(where)
    return Loaded(None, failure=sent)


def packed(loaded: Loaded) -> Loaded:
    """The same with a small batch as bytes: see [Note: small batches as bytes]."""
    data = pack(loaded.batch)
    return loaded if data is None else loaded._replace(batch=None, packed=data)


def seed_batch(key: int, request: Request) -> None:
    """Seed a worker's streams for a batch. See `Fetcher`."""
    seed_streams(mix(_BATCH_TAG, key, request.epoch, request.step))


def gives_batches(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Whether the data set gives whole batches, equal to those that `collate` makes of samples."""
    if collate is not default_collate:
        return False
    if type(dataset) is TensorDataset:
        return all(type(t) is Tensor and t.device.type == "cpu" and t.layout is torch.strided for t in dataset.tensors)
    return bool(getattr(dataset, "gives_batches", False))


def batch_of(dataset: Any, samples: Tensor) -> Any:
    """The collated batch of some samples, [n] int64."""
    if type(dataset) is TensorDataset:
        return [tensor.index_select(0, samples) for tensor in dataset.tensors]
    return dataset.batch_of(samples)


class _UnsuitableError(Exception):
    pass


class _Pickler(pickle.Pickler):
    """Pickles plain tensors as their bytes, as long as they are few."""

    num_bytes = 0

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        self.num_bytes += value.nbytes if value.layout is torch.strided else MAX_BYTES + 1
        is_plain = type(value) is Tensor and value.device.type == "cpu" and not value.requires_grad
        if not is_plain or value.is_quantized or self.num_bytes > MAX_BYTES:
            raise _UnsuitableError
        whole = value.resolve_conj().resolve_neg().contiguous()
        data = ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b""
        return _rebuild, (data, value.dtype, tuple(value.shape))


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def pack(batch: Any) -> bytes | None:
    """The batch as bytes; None if its tensors are large, or no plain ones on the CPU."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(batch)
    except _UnsuitableError:
        return None
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The batch that `pack` was given."""
    return pickle.loads(data)
