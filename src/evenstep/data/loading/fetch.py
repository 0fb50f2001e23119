"""Loading one batch: samples of the data set, through `collate_fn`. Runs in the rank, or in its workers.

[Note: small batches as bytes]

torch's loader sends every tensor as a file of shared memory, and the file's descriptor over an extra socket. That takes
about a millisecond at any size. Up to about 1 MiB, a copy through the pipe is faster.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from evenstep.data.loading.digests import digest_of
from evenstep.data.loading.nested import emptied
from evenstep.data.order.batch_plan import Request, divide
from evenstep.data.order.epochs import Epochs
from evenstep.errors import DataError
from evenstep.ground.compat.torch_data import without_worker_info
from evenstep.ground.computing import randomness
from evenstep.ground.computing.randomness import mix, seed_streams
from evenstep.ground.computing.virtual_ranks import per_rank
from evenstep.ground.health import excepthook
from evenstep.world import World

_BATCH_TAG = 0x6261746368  # "batch": makes the keys differ from those of other streams
_SAMPLE_TAG = 0x73616D706C65  # "sample"
MAX_BYTES = 524_288  # the most bytes of tensors in a batch that is sent as bytes


class Loaded(NamedTuple):
    """A batch.

    Attributes:
        batch: The result of `collate_fn`.
        packed: The batch as `pack` made it in a worker; `batch` is None then.
        num_samples: Samples of the global batch; known here only for streams.
        num_own: Samples of this rank in the batch.
        digests: For a stream, the digests of the steps that other workers load, up to and including this batch's step.
            For numbered samples, the digests that the request asks for by `has_digests`. Empty if nothing is compared.
        failure: A worker's `DataError`. If it were raised in the worker, torch would wrap it in tracebacks.
        state: The stream's state at the batch's end, with resume_streams="state".
    """

    batch: Any
    num_samples: int | None = None
    num_own: int = 0
    digests: tuple[int, ...] = ()
    failure: DataError | None = None
    packed: bytes | None = None
    state: Any = None


class Fetcher(ABC):
    """Loads the batch of a request. To torch's loader it is the data set.

    Args:
        dataset: The script's data set.
        collate_fn: Makes a batch of a list of samples; None: torch's function.
        seed: Seed, epoch, step and rank are the key of a worker's random streams, so that a resume draws the same
            numbers. The streams of the rank's own process stay as they are; see `SampleSource.load_with`.
        num_workers: Workers of each rank.
        world: The ranks.

    Attributes:
        wants_tensors: The data set returns a whole batch for an int64 tensor of sample numbers.
        notes_samples: Whether workers write the sample's number on `page`, in addition to the step.
        share: Computes this rank's share, [start, stop), of the positions from `start` to `stop`.
        page: Memory in which workers note their position, [3 * workers]: epoch, step, and number of the sample in the
            share. It is readable after their death.
    """

    wants_tensors = False
    notes_samples = False

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        seed: int,
        num_workers: int,
        world: World,
    ) -> None:
        self.dataset = dataset
        self.collate = default_collate if collate_fn is None else collate_fn
        self.page = RawArray("q", 3 * num_workers) if num_workers else None
        self.seed, self._rank = seed, world.rank
        self.share = partial(
            divide, rank=world.rank, world_size=world.world_size, virtual_ranks=per_rank(world.virtual_ranks)
        )
        # torch's thread pins batches for a GPU; it can't pin tensors inside the bytes.
        self._packs = world.device.type == "cpu"
        self._is_small = False  # whether the latest batch was packed

    @abstractmethod
    def load(self, request: Request) -> Loaded:
        """The batch of a request."""

    def __getitem__(self, request: Request) -> Loaded:
        """Load a batch, here or in a worker."""
        if get_worker_info() is None:
            return self.load(request)
        self._note(request, 0)
        if not self.wants_tensors:
            seed_streams(self.key_of(request))
        try:
            loaded = packed(self.load(request)) if self._packs else self.load(request)
        except DataError as error:
            return failed(error)
        self._is_small = loaded.packed is not None
        return loaded

    def key_of(self, request: Request) -> int:
        """The seed of the random numbers of this rank's part of a batch."""
        return mix(_BATCH_TAG, mix(self.seed, self._rank), request.epoch, request.step)

    def _note(self, request: Request, number: int) -> None:
        worker = get_worker_info()
        if self.page is not None and worker is not None:
            self.page[3 * worker.id : 3 * worker.id + 3] = [request.epoch, request.step, number]

    def _collated(self, samples: list[Any]) -> Any:
        if self._is_small and self.collate is default_collate:
            # In a worker torch's function would make a file of shared memory for each tensor.
            with without_worker_info():
                return self.collate(samples)
        return self.collate(samples)


class SampleFetcher(Fetcher):
    """Loads samples by their numbers.

    Args:
        sample_seed: Seed, epoch and sample are the key of the random streams in `__getitem__`, in every process; None:
            samples have no streams of their own.
        arguments: Arguments of `Fetcher`.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, *, sample_seed: int | None, **arguments: Any
    ) -> None:
        super().__init__(dataset, collate_fn, **arguments)
        self.wants_tensors = gives_batches(dataset, self.collate)
        self._sample_seed = None if self.wants_tensors else sample_seed  # such a data set draws no random numbers
        self._gives_several = self._sample_seed is None and bool(getattr(dataset, "__getitems__", None))
        self.notes_samples = not self.wants_tensors and not self._gives_several
        self._epochs = Epochs(dataset)

    def load(self, request: Request) -> Loaded:
        """See `Fetcher.load`.

        If samples have their own streams, those of the rank's process are restored afterwards.
        """
        if self._sample_seed is None or get_worker_info() is not None:
            return self._load(request)
        with randomness.preserved():
            return self._load(request)

    def _load(self, request: Request) -> Loaded:
        self._epochs.tell(request.epoch)
        if request.example is not None:
            one, two, three = (self._sample(request.example, request.epoch) for _ in range(3))
            batch = emptied(self.collate([one]), self.collate([two, three]))
        elif self.wants_tensors:
            batch = batch_of(self.dataset, torch.as_tensor(request.samples, device="cpu"))
        else:
            batch = self._collated(self._samples(request))
        num_own = 0 if request.example is not None else len(request.samples)
        return Loaded(batch, num_own=num_own, digests=self._looked() if request.has_digests else ())

    def _looked(self) -> tuple[int, int]:
        """Digests of two reads of a few fixed samples. They differ if the reads differ or fail."""
        with randomness.preserved():
            try:
                size = len(self.dataset)
                numbers = sorted({0, size // 3, 2 * size // 3, size - 1})
                one, two = (digest_of([self.dataset[number] for number in numbers]) for _ in range(2))
                return one, two
            except Exception:  # of the user's data set: there is no verdict
                return 0, 1

    def _samples(self, request: Request) -> list[Any]:
        if self._gives_several:
            return list(self.dataset.__getitems__(request.samples))
        loaded: list[Any] = []
        sample = None
        try:
            if self._sample_seed is None and get_worker_info() is None:
                for sample in request.samples:
                    loaded.append(self.dataset[sample])
                return loaded
            for number, sample in enumerate(request.samples):
                self._note(request, number)
                loaded.append(self._sample(sample, request.epoch))
        except Exception as error:
            if not isinstance(error, DataError) and hasattr(error, "add_note"):  # python 3.11
                error.add_note(f"while evenstep loaded sample {sample}, epoch {request.epoch}, step {request.step}")
            raise
        return loaded

    def _sample(self, sample: Any, epoch: int) -> Any:
        if self._sample_seed is not None:
            seed_streams(mix(_SAMPLE_TAG, self._sample_seed, epoch, sample))
        return self.dataset[sample]


def failed(error: DataError) -> Loaded:
    """The error that a worker returns instead of a batch, without parts that can't be sent between processes."""
    sent = DataError(str(error))
    where = excepthook.traceback_in_users_code(error.__cause__)
    if where and hasattr(sent, "add_note"):  # python 3.11
        sent.add_note(where)
    return Loaded(None, failure=sent)


def packed(loaded: Loaded) -> Loaded:
    """Replace a small batch by its bytes: see [Note: small batches as bytes]."""
    data = pack(loaded.batch)
    return loaded if data is None else loaded._replace(batch=None, packed=data)


def gives_batches(dataset: Any, collate: Callable[[list[Any]], Any]) -> bool:
    """Whether the data set gives whole batches, equal to collated samples."""
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
    """Pickles plain tensors as their bytes, up to a limit."""

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
    """The batch as bytes; None if its tensors are large, or not plain CPU tensors."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(batch)
    except _UnsuitableError:
        return None
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The batch that `pack` packed."""
    return pickle.loads(data)
