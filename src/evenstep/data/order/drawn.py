"""`Drawing`: the global batches of one iteration, drawn from a sampler or a batch sampler.

Every rank draws the whole order and takes its slices. The position is the number of samples and a digest of their
indices: a resume draws the indices again, compares the digests, and loads no data.

[Note: a sampler's random numbers]
torch's own samplers are copied for each iteration and given a generator that is seeded by (seed, epoch, `initial_seed`
of the script's generator), so they draw from no stream of the process. While any other sampler draws a global batch,
python's, torch's and numpy's streams are replaced by the sampler's own, seeded by (seed, epoch); afterwards the
script's are restored. A generator or counter inside a sampler can't be controlled from here. So the sampler's draws
must depend on `set_epoch` only, or it has `state_dict` and `load_state_dict`: then its state is saved with each batch,
and nothing is drawn again.

[Note: a sampler's own state]
The state at an epoch's end may equal the state at a beginning, for example if a sampler stores the rest of a list. So
one batch is drawn ahead from a sampler with a state: the last batch of an epoch has the state after the end, and
"ended". A run that continues there draws nothing in that epoch. After such a state is loaded, some samplers give
nothing once and then begin anew; others begin at once. So a resume draws one index; if there is one, it loads the state
again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from evenstep.data.order.epochs import Epochs
from evenstep.data.order.max_tokens import TokenBatches
from evenstep.data.position import Mark
from evenstep.errors import UsageError
from evenstep.ground.computing.randomness import OwnStreams, mix

_SAMPLER_TAG = 0x73616D706C6572  # "sampler": makes the keys differ from those of other streams
_TORCHS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_CHUNK = 16_384  # indices that are drawn again at a time


@dataclass(frozen=True)
class Sampling:
    """The sampler of a loader: the script's, or `TokenBatches` for `max_tokens`.

    Attributes:
        sampler: Gives indices, or global batches of them.
        size: Samples of a global batch; None: the sampler gives batches.
        drop_last: Leave out a short last global batch.
        seed: The seed of the sampler's draws.
    """

    sampler: Any
    size: int | None
    drop_last: bool
    seed: int

    @property
    def is_ours(self) -> bool:
        """Whether the sampler is evenstep's own, which depends only on seed and epoch."""
        return isinstance(self.sampler, TokenBatches)

    def num_batches(self, epoch: int) -> int:
        """Steps of an epoch, from the sampler's present length; `TypeError` if it has none."""
        Epochs(self.sampler).tell(epoch)
        if self.size is None:
            return len(self.sampler)
        full, rest = divmod(len(self.sampler), self.size)
        return full + (rest > 0 and not self.drop_last)

    def in_words(self) -> str:
        """The sampler's class, and the location of its `__iter__`."""
        kind = type(self.sampler)
        code = getattr(getattr(kind, "__iter__", None), "__code__", None)
        return f"{kind.__name__} ({code.co_filename}:{code.co_firstlineno})" if code is not None else kind.__name__


class Drawing:
    """One iteration's global batches: the part of an epoch that was drawn.

    For `gather`, it stores 8 bytes for each drawn sample; an index that is no whole number is stored as an object.

    Args:
        sampling: The sampler to draw from.
        start: Where the iteration begins. Earlier indices are drawn and compared, unless the sampler has a state.

    Attributes:
        number: The number of the epoch.
        last: `Mark.drawn` for the beginning of the next epoch, once this epoch has ended.
        is_wrong: Whether the samples drawn up to `start` differ from those of the saved run.
    """

    def __init__(self, sampling: Sampling, start: Mark) -> None:
        self._sampling, self.number = sampling, start.epoch
        self._epochs = Epochs(sampling.sampler)
        self._epochs.tell(self.number)
        self._sampler, self._draws_nothing = _copied(sampling, start.epoch)
        self._streams = OwnStreams(mix(_SAMPLER_TAG, sampling.seed, start.epoch))
        self._digest = hashlib.blake2b(digest_size=7)
        self._has_state = all(callable(getattr(self._sampler, f"{verb}state_dict", None)) for verb in ("", "load_"))
        saved = start.drawn or {}
        self._first_step: int = saved.get("step", 0)
        self._bounds = [start.position]
        self._batches: list[Any] = []
        self._ahead: tuple[list[Any], dict[str, Any]] | None = None
        self.last: dict[str, Any] | None = None
        is_restored = self._has_state and saved.get("state") is not None
        with self._in_use():
            if is_restored:
                self._load(saved)
            self._iterator: Iterator[Any] = iter(self._sampler) if self._ahead is None else iter(())
        self.is_wrong = not is_restored and not self._replays(start.position, saved.get("digest"))

    @property
    def digest(self) -> int:
        """The digest of all indices drawn in this epoch, in their order."""
        return int.from_bytes(self._digest.digest(), "little")

    def draw(self) -> tuple[list[Any], Mark] | None:
        """The next global batch, and the position at its end; None at the end of the epoch."""
        indices, own = self._advance() if self._ahead is None else self._ahead
        if not indices:
            self.last = {"step": 0, "digest": 0, **own} if own else None
            return None
        self._add(indices)
        self._batches.append(_packed(indices))
        self._bounds.append(self._bounds[-1] + len(indices))
        if self._has_state:
            self._ahead = self._advance()
            own = own if self._ahead[0] else self._ahead[1]
        drawn = {"step": self._first_step + len(self._batches), "digest": self.digest, **own}
        return indices, Mark(self.number, self._bounds[-1], drawn=drawn)

    def _advance(self) -> tuple[list[Any], dict[str, Any]]:
        """The next global batch, empty at the epoch's end, and the state of a sampler that has one."""
        if not self._has_state:
            with self._in_use():
                return self._next(), {}
        # A resume begins here, with new random streams.
        self._streams = OwnStreams(mix(_SAMPLER_TAG, self._sampling.seed, self.number, self._bounds[-1]))
        with self._in_use():
            indices = self._next()
            own = {"state": copy.deepcopy(self._sampler.state_dict())}
        return indices, own if indices else own | {"ended": True}

    def _load(self, saved: dict[str, Any]) -> None:
        """Give the sampler a saved state: see [Note: a sampler's own state]."""
        self._digest.update(b"%d" % saved["digest"])
        self._sampler.load_state_dict(copy.deepcopy(saved["state"]))
        if not saved.get("ended"):
            return
        if next(iter(self._sampler), None) is not None:
            self._sampler.load_state_dict(copy.deepcopy(saved["state"]))
        if self._first_step:
            self._ahead = [], {"state": saved["state"], "ended": True}

    def _next(self) -> list[Any]:
        if self._sampling.size is None:
            return next((list(batch) for batch in self._iterator if len(batch)), [])
        indices = list(islice(self._iterator, self._sampling.size))
        return [] if self._sampling.drop_last and len(indices) < self._sampling.size else indices

    def _replays(self, position: int, expected: int | None) -> bool:
        """Draw up to a position. Returns whether it exists and the indices equal those drawn before."""
        done = 0
        while done < position:
            with self._in_use():
                whole = self._sampling.size is None
                indices = self._next() if whole else list(islice(self._iterator, min(_CHUNK, position - done)))
            if not indices:
                return False
            self._add(indices)
            done += len(indices)
        return done == position and expected in (None, self.digest)

    def _add(self, indices: list[Any]) -> None:
        """Update the digest. Not by the batch: a resume draws the same indices again in larger pieces."""
        packed = _packed(indices)
        if isinstance(packed, array):
            self._digest.update(packed.tobytes())
            return
        for each in indices:
            one = _packed([each])
            self._digest.update(one.tobytes() if isinstance(one, array) else f"{each!r}\0".encode())

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Context in which the sampler draws with the streams of its epoch: see [Note: a sampler's random numbers]."""
        self._epochs.tell(self.number)
        with contextlib.nullcontext() if self._draws_nothing else self._streams.in_use():
            yield

    # ------------------------------------------------------------------ what was drawn

    @property
    def num_batches(self) -> int:
        """The number of steps drawn so far, including those before `start`."""
        return self._first_step + len(self._batches)

    def global_batch(self, step: int) -> tuple[int, int]:
        """See `ComputedEpoch`."""
        number = step - self._first_step
        return self._bounds[number], self._bounds[number + 1]

    def step_at(self, position: int) -> int | None:
        """See `ComputedEpoch`."""
        return self._first_step + bisect_left(self._bounds, position)

    def indices(self, step: int) -> list[Any]:
        """The indices of a drawn global batch."""
        return list(self._batches[step - self._first_step])

    def at(self, positions: Tensor) -> Tensor:
        """See `ComputedEpoch`.

        Raises:
            UsageError: The sampler's indices aren't sample numbers.
        """
        if not all(isinstance(each, array) for each in self._batches):
            raise UsageError(
                f"loader.gather: the indices of {self._sampling.in_words()} aren't numbers, so rows can't "
                f"be ordered by them."
            )
        parts = [torch.tensor(each, dtype=torch.int64, device="cpu") for each in self._batches]
        return torch.cat(parts)[positions - self._bounds[0]] if parts else positions.clone()


def _packed(indices: list[Any]) -> Any:
    try:
        return array("q", indices)
    except (TypeError, OverflowError):
        return indices


def _copied(sampling: Sampling, epoch: int) -> tuple[Any, bool]:
    """The sampler to draw from, and whether it is a copy that uses no stream of the process (torch's or evenstep's)."""
    sampler = sampling.sampler
    if not sampling.is_ours and type(sampler) not in _TORCHS:
        return sampler, False
    own, given = copy.copy(sampler), getattr(sampler, "generator", None)
    key = mix(_SAMPLER_TAG, sampling.seed, epoch, 0 if given is None else given.initial_seed())
    own.generator = torch.Generator().manual_seed(key >> 1)
    return own, True
