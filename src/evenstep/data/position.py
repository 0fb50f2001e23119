"""The position of a loader: batches that it yielded, and batches that an optimizer has used.

A loader yields a batch; some lines later an optimizer steps. Only then are its samples consumed: a state that is saved
in between belongs to a model that has not used them. With accumulation several batches wait for one step. So each
loader stores the end positions of the batches that it yielded, and the step of any torch optimizer commits the used
batches, through the hook that torch calls after every step. Batches that were only prefetched aren't counted.

[Note: consumers that read ahead]

The loop may train on another batch than the last yielded one: accelerate, for one, reads the next batch from the loader
before it hands the present batch to the loop. So, while more than one batch waits for a step, the inputs of wrapped
models are checked, and batches are recognised by the memory of their tensors and of views of these. A step commits up
to the newest batch that a model was given. The number of batches yielded after that batch is the consumer's distance
ahead. The same distance is assumed for steps before which no batch was recognised.

A batch is never recognised if the model isn't wrapped, or is given copies (`x.float() / 255`). Then a step commits up
to the last yielded batch. If the epoch's steps show that the consumer read ahead, the epoch ends with a warning.

[Note: which epoch comes next]

epoch     `loader.epoch`: the epoch being iterated, or, between two iterations, the next one
coming    the epoch of the next iteration outside of `epochs`: one more than the last that was *begun*, so that
          a loop that always stops early doesn't see the same samples each time
first     the start of `epochs`: one more than the last that was *finished*, so that a batch read before
          training doesn't cost an epoch
base      `first` when the run began. A resumed run starts there again and leaves out finished epochs, so that the
          loops of the script, `epochs(2)` and then `epochs(8)`, have the same epochs as without the interruption

After `resume` the interrupted epoch begins at its position, until it is finished or another epoch is chosen. Every
iteration begins there until an optimizer has used some of it: a first batch that is only read doesn't skip the rest of
the epoch. If the interrupted iteration wasn't the first of its epoch (an evaluation came before the training), as many
iterations begin at the position; later ones, and all after the training, are of the whole epoch.

Without `epochs`, an iteration that finds nothing left of the epoch finishes it. If the run was interrupted in `epochs`,
or after it, even such an iteration was only a look for a first batch, and `epochs` begins at the position all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_post_hook

from evenstep.ground.compat.torch_tensors import StorageWeakRef, weak_storage
from evenstep.ground.computing.pytrees import tensors_in
from evenstep.ground.health.users_code import warn
from evenstep.replica.batches import input_watchers

_MOST_WAITING = 256  # the most batches that wait for a step; older ones are dropped: evaluation has no steps
_MOST_TENSORS = 16  # the most tensors of a batch, or of a model's inputs, that are compared


class Mark(NamedTuple):
    """A position in training.

    Attributes:
        epoch: Number of the epoch.
        position: Samples of the epoch that all ranks together have consumed.
        state: This rank's state at the position, such as the state of its stream; often None.
        drawn: If a sampler of the script gives the order: "step", the number of steps up to the position; "digest", the
            digest of the indices drawn; "state", the sampler's own state, if it has one; "ended", whether that state is
            from the end of an epoch.
    """

    epoch: int = 0
    position: int = 0
    state: Any = None
    drawn: Any = None


class _Piece(NamedTuple):
    """The memory of a tensor. Views of the tensor lie inside of it.

    Attributes:
        storage: The whole storage, which tensors of other batches may share. Keeps no memory alive.
        begin: Address of the tensor's first byte.
        end: Address after the tensor's last byte.
    """

    storage: StorageWeakRef
    begin: int
    end: int


class _Waiting(NamedTuple):
    """A batch that waits for an optimizer's step.

    Attributes:
        number: The batch's number in its iteration, counted from 1.
        end: The position at the batch's end.
        pieces: The memory of the batch's first tensors.
    """

    number: int
    end: Mark
    pieces: tuple[_Piece, ...]


class Progress:
    """The committed position of one loader, and the batches that wait for a step.

    See [Note: consumers that read ahead].

    Attributes:
        committed: The position.
        num_before: Iterations of the epoch before the one in which a batch was used last.
        has_used_any: Whether a batch was used since the last jump.
        num_yielded: Batches of the latest iteration.
    """

    def __init__(self) -> None:
        self.committed = Mark()
        self.num_before = self._num_before_this = 0
        self.has_used_any = False
        self._num_commits = 0
        self._has_warned = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._waiting: deque[_Waiting] = deque(maxlen=_MOST_WAITING)
        self.num_yielded = 0
        self._newest_given: int | None = None  # number of the newest batch that a model was given since the last step
        self._num_ahead = 0  # batches that the consumer had read after the batch that it used
        self._commits_at_start = self._num_commits
        self._was_recognised = self._is_over = False
        self._yielded_at_step = 0
        self._gaps: list[int] = []  # batches yielded before the first step, and the most before a later step
        self._num_gaps = 0
        input_watchers.discard(self)

    def start(self, num_before: int = 0) -> None:
        """Called when an iteration begins: drop the batches that wait for a step.

        Args:
            num_before: Earlier iterations of the same epoch.
        """
        self._num_before_this = num_before
        _follow(self)
        self._begin_anew()

    def add(self, end: Mark, batch: Any) -> None:
        """Called when a batch is yielded; `end` is the position at its end."""
        self.num_yielded += 1
        self._waiting.append(_Waiting(self.num_yielded, end, tuple(_pieces(batch))))
        self._watch()

    @property
    def trains(self) -> bool:
        """Whether an optimizer has stepped since the iteration began."""
        return self._num_commits > self._commits_at_start

    def end(self, mark: Mark) -> None:
        """Called when the epoch has ended; `mark` is the beginning of the next.

        If no optimizer has stepped since the epoch's beginning, the epoch isn't used for training, and counts as used.
        If the consumer has only read the whole epoch ahead, a later step corrects that.
        """
        if not (self._waiting and self.trains):
            self.committed = mark
        if self._waiting:
            self._waiting.append(self._waiting.pop()._replace(end=mark))
        self._is_over = True

    def jump(self, mark: Mark) -> None:
        """Continue at `mark`."""
        self._begin_anew()
        self.committed = mark
        self.has_used_any = False

    def commit(self) -> None:
        """Count the yielded batches as used, without those that the consumer only read ahead."""
        self._num_commits += 1
        self._note_gap()
        if self._newest_given is not None:
            self._num_ahead = self.num_yielded - self._newest_given
            self._newest_given = None
        newest = self.num_yielded - self._num_ahead
        while self._waiting and self._waiting[0].number <= newest:
            self.committed = self._waiting.popleft().end
            self.has_used_any, self.num_before = True, self._num_before_this
        self._watch()

    def see(self, inputs: Any) -> None:
        """Called when a wrapped model gets `inputs`, for training."""
        given = list(_pieces(inputs))
        for waiting in reversed(self._waiting):
            if any(_lies_in(piece, own) for piece in given for own in waiting.pieces):
                self._newest_given = max(waiting.number, self._newest_given or 0)
                self._was_recognised = True
                return

    def _watch(self) -> None:
        """Check the inputs of models while the next batch to be used may differ from the last yielded batch."""
        if len(self._waiting) > (0 if self._num_ahead else 1):
            input_watchers.add(self)
        else:
            input_watchers.discard(self)

    def _note_gap(self) -> None:
        """Warn at the epoch's end if its steps show that the consumer read ahead.

        Such a consumer read more batches before the first step than before any later step, and a step after the last
        batch had no batch left to use. (A last step of an unfinished accumulation, after the epoch, uses batches that
        wait.) Three steps at least, because the last may be that of a shorter accumulation.
        """
        gap, self._yielded_at_step = self.num_yielded - self._yielded_at_step, self.num_yielded
        if gap:
            self._num_gaps += 1
            self._gaps = [*self._gaps, gap] if len(self._gaps) < 2 else [self._gaps[0], max(self._gaps[1], gap)]
            return
        reads_ahead = self._is_over and not self._waiting and self._num_gaps > 2 and self._gaps[0] > self._gaps[1]
        if reads_ahead and not (self._was_recognised or self._has_warned):
            self._has_warned = True
            warn(
                "DataLoader: a library reads batches ahead (accelerate does), and no wrapped model gets the loader's "
                "tensors. So the position counts batches that were read and not yet used, and a resumed run would skip "
                "them. Give the loader's tensors to the model unchanged and convert them inside the model, or convert "
                "them in collate_fn.",
            )


_followed: WeakSet[Progress] = WeakSet()
_is_registered = False


def _follow(progress: Progress) -> None:
    """Make the steps of all optimizers commit `progress`, as long as that object lives."""
    global _is_registered
    _followed.add(progress)
    if not _is_registered:
        _is_registered = True
        register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    for progress in list(_followed):
        progress.commit()


def _pieces(batch: Any) -> Iterator[_Piece]:
    """The memory of the first tensors of a batch, or of a model's inputs."""
    for tensor in islice(tensors_in(batch), _MOST_TENSORS):
        try:
            storage, begin = tensor.untyped_storage(), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # without its own memory: sparse, or a subclass
            continue
        yield _Piece(weak_storage(storage), begin, begin + tensor.nbytes)


def _lies_in(piece: _Piece, whole: _Piece) -> bool:
    return piece.storage == whole.storage and whole.begin <= piece.begin <= whole.end


class EpochCounter:
    """Counts epochs: see [Note: which epoch comes next]. `set` sets all numbers; iterations and loops advance them.

    Args:
        progress: The loader's position.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.epoch = 0
        self.base = 0
        self._coming = 0
        self._first = 0
        self._in_loop = False
        self._has_looped = False
        # The position at which a resumed run was interrupted in `epochs` or after it, until a loop has come to it.
        self._interrupted: Mark | None = None
        self._resumed = Mark()
        self._num_before = 0  # iterations of the epoch before the interrupted one
        self._begun = Mark().epoch, 0  # an epoch, and its iterations that have begun
        self._waits: Mark | None = None  # position at which a resumed run will continue; None once it has continued

    @property
    def has_looped(self) -> bool:
        """Whether `epochs` has begun, in this run or before its interruption."""
        return self._has_looped or self._interrupted is not None

    @property
    def waits(self) -> Mark | None:
        """The position at which a resumed run will continue; None once it has continued."""
        return self._waits if self._waits is self._progress.committed else None

    def set(self, epoch: int) -> Mark:
        """Begin the next iteration and the next loop with `epoch`; returns the position in it."""
        if epoch != self._resumed.epoch:
            self._resumed = Mark(epoch)
        if not self._has_looped:
            self.base = epoch
        self._waits = self._interrupted = None
        self._move(epoch)
        return self._resumed

    def resume(self, mark: Mark, base: int, *, num_before: int, had_looped: bool) -> None:
        """Continue a run that began with epoch `base` and was interrupted at `mark`.

        Args:
            mark: The position.
            base: The epoch.
            num_before: See `Progress`.
            had_looped: `has_looped` at the interruption.
        """
        self._begun, self._num_before = (mark.epoch, 0), num_before
        self.epoch = self._coming = mark.epoch
        self._first = self.base = base
        self._has_looped = False
        self._interrupted = mark if had_looped else None
        self._resumed = self._waits = mark

    def begin(self) -> Mark:
        """Begin an iteration; returns its start. Inside a loop every iteration is of the loop's epoch."""
        if not self._in_loop:
            self.epoch = self._next()
        self._begun = self.epoch, 1 + (self.num_begun if self._begun[0] == self.epoch else 0)
        self._coming = self.epoch + 1
        return self._resumed if self._resumed.epoch == self.epoch else Mark(self.epoch)

    @property
    def num_begun(self) -> int:
        """Iterations of the latest epoch that have begun."""
        return self._begun[1]

    def end(self, epoch: int, *, finished: bool) -> None:
        """End the iteration of `epoch`, after its last batch or earlier."""
        if finished:
            self._waits = None
            has_trained = self._progress.has_used_any
            if self._interrupted is None or has_trained:
                self._first = max(self._first, epoch + 1)
            elif self._has_looped and self._progress.num_yielded:
                # Between two loops of a resumed run, as before its interruption. `base` counts earlier iterations.
                self._first += 1
            if self._resumed.epoch == epoch and (has_trained or self.num_begun > self._num_before):
                self._resumed = Mark(epoch)
        if not self._in_loop and self.epoch == epoch:
            self.epoch = self._next()

    def _next(self) -> int:
        """The epoch of the next iteration outside of a loop."""
        return self._coming if self.waits is None else self.waits.epoch

    def loop(self, num_epochs: int) -> Iterator[int]:
        """Yield the next `num_epochs` epochs without the finished ones; each is set while the caller's loop runs."""
        if not self._has_looped:
            self._has_looped = True
            self.base = self._first
        for epoch in range(self._first, self._first + num_epochs):
            if epoch < self._resumed.epoch:
                self._first = epoch + 1
                continue
            if self._interrupted is not None and not self._progress.has_used_any:
                self._resumed = self._interrupted
                self._progress.jump(self._interrupted)
            self._interrupted, self._begun = None, (epoch, 0)
            self._move(epoch)
            self._in_loop = True
            try:
                yield epoch
            finally:
                # Also when the caller's loop is left by `break` or an exception: no epoch begins twice.
                self._in_loop = False
                self.epoch = self._coming
            self._move(epoch + 1)

    def _move(self, epoch: int) -> None:
        self.epoch = self._coming = self._first = epoch
