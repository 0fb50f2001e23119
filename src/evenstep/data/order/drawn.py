"""`Drawing`: the global batches of one iteration, as a sampler or a batch sampler of the script gives them.

Every rank draws the whole order and takes its slices. The position is the number of samples and a digest of their
indices: a resume replays the indices, compares the digests, and loads no data.

[Note: a sampler's random numbers]
torch's own samplers are copied for each iteration and given a generator that is seeded by (seed, epoch, `initial_seed`
of the script's generator), so they draw from no stream of the process. While any other sampler draws a global batch,
python's, torch's and numpy's streams are its own, seeded by (seed, epoch) and exchanged around the batch: the script's
are as without it. A generator or counter that a sampler holds itself is beyond reach. Its draws must follow from
`set_epoch`, or it has `state_dict` and `load_state_dict`, whose state is kept with each batch, and nothing is replayed.

[Note: a sampler's own state]
The state of an epoch's end may be that of a beginning, as where a sampler keeps what is left of a list. So from a
sampler with a state one batch is drawn ahead: the last batch of an epoch has the state behind the end, and "ended". A
run that goes on there draws nothing in that epoch. Some samplers give nothing after such a state is loaded, and then
begin anew; others begin at once. So a resume looks whether a first index comes, and if one does, loads the state again.
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
from evenstep.randomness import OwnStreams, mix

_SAMPLER_TAG = 0x73616D706C6572  # "sampler": other streams from the same seed stay unrelated
_TORCHS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_CHUNK = 16_384  # indices that are replayed at a time


@dataclass(frozen=True)
class Sampling:
    """The sampler of a loader: the script's, or the one by which `max_tokens` is kept.

    Attributes:
        sampler: Gives indices, or global batches of them.
        size: Samples of a global batch; None: the sampler gives batches.
        drop_last: Leave out a last global batch that is short.
        seed: Of what it draws.
    """

    sampler: Any
    size: int | None
    drop_last: bool
    seed: int

    @property
    def is_ours(self) -> bool:
        """Whether it is evenstep's own, which depends on seed and epoch alone."""
        return isinstance(self.sampler, TokenBatches)

    def num_batches(self, epoch: int) -> int:
        """Steps of an epoch, as the sampler's length has it now; `TypeError` if it has none."""
        Epochs(self.sampler).tell(epoch)
        if self.size is None:
            return len(self.sampler)
        full, rest = divmod(len(self.sampler), self.size)
        return full + (rest > 0 and not self.drop_last)

    def in_words(self) -> str:
        """Its class, and where its `__iter__` stands."""
        kind = type(self.sampler)
        code = getattr(getattr(kind, "__iter__", None), "__code__", None)
        return f"{kind.__name__} ({code.co_filename}:{code.co_firstlineno})" if code is not None else kind.__name__


class Drawing:
    """One iteration's global batches: an epoch, as far as it was drawn.

    It holds 8 bytes for each sample that was drawn, for `gather`; an index that is no whole number is held as it is.

    Args:
        sampling: By what to draw.
        start: Where the iteration begins. What comes before is drawn and compared, unless the sampler has a state.

    Attributes:
        number: Of the epoch.
        last: `Mark.drawn` of the beginning of the next epoch, once this one has ended.
        is_wrong: Other samples were drawn up to `start` than in the run that was there.
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
        """Of all indices drawn in this epoch, in their order."""
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
        """The next global batch, empty at the epoch's end, and what is kept of a sampler that has a state."""
        if not self._has_state:
            with self._in_use():
                return self._next(), {}
        # A resume begins here, without the streams' past.
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
        """Draw up to a position; whether there is one, and the indices are those that were drawn before."""
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
        packed = _packed(indices)
        self._digest.update(packed.tobytes() if isinstance(packed, array) else repr(packed).encode())

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """The sampler draws, in its epoch: see [Note: a sampler's random numbers]."""
        self._epochs.tell(self.number)
        with contextlib.nullcontext() if self._draws_nothing else self._streams.in_use():
            yield

    # ------------------------------------------------------------------ what was drawn

    @property
    def num_batches(self) -> int:
        """The step after the last that was drawn."""
        return self._first_step + len(self._batches)

    def global_batch(self, step: int) -> tuple[int, int]:
        """See `ComputedEpoch`."""
        number = step - self._first_step
        return self._bounds[number], self._bounds[number + 1]

    def step_at(self, position: int) -> int | None:
        """See `ComputedEpoch`."""
        return self._first_step + bisect_left(self._bounds, position)

    def indices(self, step: int) -> list[Any]:
        """Of a global batch that was drawn."""
        return list(self._batches[step - self._first_step])

    def at(self, positions: Tensor) -> Tensor:
        """See `ComputedEpoch`.

        Raises:
            UsageError: The sampler doesn't number the samples.
        """
        if not all(isinstance(each, array) for each in self._batches):
            raise UsageError(f"loader.gather: the indices of {self._sampling.in_words()} are no numbers to order by.")
        parts = [torch.tensor(each, dtype=torch.int64, device="cpu") for each in self._batches]
        return torch.cat(parts)[positions - self._bounds[0]] if parts else positions.clone()


def _packed(indices: list[Any]) -> Any:
    try:
        return array("q", indices)
    except (TypeError, OverflowError):
        return indices


def _copied(sampling: Sampling, epoch: int) -> tuple[Any, bool]:
    """The sampler to draw from, and whether it is a copy that draws from no stream of the process: torch's, or ours."""
    sampler = sampling.sampler
    if not sampling.is_ours and type(sampler) not in _TORCHS:
        return sampler, False
    own, given = copy.copy(sampler), getattr(sampler, "generator", None)
    key = mix(_SAMPLER_TAG, sampling.seed, epoch, 0 if given is None else given.initial_seed())
    own.generator = torch.Generator().manual_seed(key >> 1)
    return own, True
