"""Whether, and with how many ranks, a run goes on after ranks are lost: `evenstep run --recover`.

A survivor saves the step that all ranks had finished (`checkpoint.save.survivors`), and the ranks that are started next
go on from there. So a loss costs a step at most, and isn't counted as a restart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evenstep.checks import counted
from evenstep.health.heartbeat import Heartbeat, Phase
from evenstep.health.recovery_files import Losses
from evenstep.launcher.failure.report import Failure


@dataclass(frozen=True)
class RecoveryPolicy:
    """How a run goes on after a loss.

    Attributes:
        shrinks: With those that are left; else with as many ranks as before.
        min_ranks: With fewer it doesn't go on.
        most_in_vain: How often in a row it may go on without having finished another step.
        save_s: How long survivors may take until one of them begins to save.
    """

    shrinks: bool = False
    min_ranks: int = 1
    most_in_vain: int = 3
    save_s: float = 120.0


@dataclass(frozen=True)
class Recovery:
    """How the run goes on after one loss.

    Attributes:
        num_ranks: With how many ranks; None: with all that the nodes have, several of them.
        lost: The ranks that were lost.
        step: From which step.
        from_memory: A survivor has saved it; else it is the newest checkpoint on disk.
        num_repeated: How many steps are made again, at most; from disk that isn't known.
    """

    num_ranks: int | None
    lost: tuple[int, ...]
    step: int
    from_memory: bool
    num_repeated: int = 1

    def __str__(self) -> str:
        where = "memory" if self.from_memory else "the newest checkpoint on disk"
        who = "all ranks" if self.num_ranks is None else counted(self.num_ranks, "rank")
        verb = "goes" if self.num_ranks == 1 else "go"
        return f"{who} {verb} on from {where}, at step {self.step}"


class Recoveries:
    """All recoveries of a run. Pure.

    Attributes:
        policy: How it goes on.
    """

    def __init__(self, policy: RecoveryPolicy) -> None:
        self.policy = policy
        self._made: list[Recovery] = []
        self._num_in_vain = 0
        self._lost_ns = 0
        self._lost_since_ns: int | None = None

    def plan(
        self,
        failure: Failure,
        *,
        num_ranks: int | None,
        in_memory: int | None,
        on_disk: int | None,
        is_new: bool = True,
        virtual_ranks: int | None = None,
    ) -> Recovery | str:
        """How the run goes on after a loss (`is_loss`, as all nodes know it together); a text: why it doesn't.

        Args:
            failure: Of an attempt, all of whose ranks have ended, as this node knows it.
            num_ranks: How many there were; None: on several nodes, which go on with all ranks that they have then.
            in_memory: The newest step that a survivor has saved; None: none.
            on_disk: The newest checkpoint of this run; None: none.
            is_new: A survivor has saved in this attempt; else it was lost with all its ranks.
            virtual_ranks: In reproducible mode, how many; the number of ranks divides it.
        """
        step = max((each for each in (in_memory, on_disk) if each is not None), default=None)
        if step is None:
            return "nothing was saved; that needs a Checkpointer, with resume() and step()"
        in_vain = self._num_in_vain + 1 if self._made and step <= self._made[-1].step else 0
        if in_vain >= self.policy.most_in_vain:
            return f"{in_vain} recoveries in a row came to no step beyond {step}"
        lost = lost_ranks(failure)
        left = num_ranks
        if left is not None:
            left -= len(lost) if self.policy.shrinks else 0
            if virtual_ranks is not None:
                left = next((n for n in range(left, 0, -1) if virtual_ranks % n == 0), 0)
            if left < max(1, self.policy.min_ranks):
                return f"{counted(left, 'rank')} could go on, and --min-ranks is {self.policy.min_ranks}"
        num_repeated = 1 if is_new else 1 + max((page.step for page in failure.pages.values()), default=0)
        return Recovery(left, lost, step, from_memory=in_memory == step, num_repeated=num_repeated)

    def note(self, recovery: Recovery, *, noticed_ns: int) -> None:
        """The run goes on so.

        Args:
            recovery: What `plan` has returned.
            noticed_ns: When the loss was noticed (monotonic).
        """
        self._num_in_vain = self._num_in_vain + 1 if self._made and recovery.step <= self._made[-1].step else 0
        self._made.append(recovery)
        if self._lost_since_ns is None:
            self._lost_since_ns = noticed_ns

    @property
    def number(self) -> int:
        """How many there were."""
        return len(self._made)

    @property
    def awaits_step(self) -> bool:
        """Whether the ranks have not finished a step since the last one."""
        return self._lost_since_ns is not None

    def stepped(self, time_ns: int) -> None:
        """All ranks have finished a step since the last one, at this time (monotonic)."""
        if self._lost_since_ns is not None:
            self._lost_ns += max(0, time_ns - self._lost_since_ns)
            self._lost_since_ns = None

    @property
    def losses(self) -> Losses:
        """What was lost so far, and what it cost."""
        return Losses(
            num_ranks=sum(len(each.lost) for each in self._made),
            num_repeated=sum(each.num_repeated for each in self._made if each.from_memory),
            num_from_disk=sum(not each.from_memory for each in self._made),
            lost_s=self._lost_ns / 1e9,
        )

    def describe(self) -> str:
        """What was lost and what it cost, for the end of the run; "" if nothing was."""
        if not self._made:
            return ""
        losses = self.losses
        verb = "was" if losses.num_ranks == 1 else "were"
        what = f"{counted(losses.num_ranks, 'rank')} {verb} lost" + ("" if self.policy.shrinks else " and replaced")
        steps = f"{counted(losses.num_repeated, 'step')} repeated at most"
        disk = f", {counted(losses.num_from_disk, 'time')} from a checkpoint on disk" if losses.num_from_disk else ""
        return f"{what}, {steps}{disk}, {losses.lost_s:.1f} s lost"


def may_still_save(
    alive: Iterable[Heartbeat],
    *,
    has_saved: bool,
    noticed_ns: int,
    now_ns: int,
    begins_within_s: float,
    ends_within_s: float,
) -> bool:
    """Whether a survivor is waited for, that may still save the last step. Pure.

    While one saves, also where another has saved: it may be a step ahead. A save that began before the loss may be
    one that waits for the lost rank; it counts as long as nobody has saved.

    Args:
        alive: The pages of the ranks that run.
        has_saved: One has saved all that it had to save.
        noticed_ns: When the loss was noticed (monotonic).
        now_ns: The time now, on the same clock.
        begins_within_s: How long after the loss the first one may begin.
        ends_within_s: How long after the loss the last one may end.
    """
    elapsed_s = (now_ns - noticed_ns) / 1e9
    if any(seen.phase is Phase.SAVING and (not has_saved or seen.time_ns > noticed_ns) for seen in alive):
        return elapsed_s < ends_within_s
    return not has_saved and elapsed_s < begins_within_s


def is_loss(failure: Failure | None) -> bool:
    """Whether ranks were lost, and not ended by a mistake that the next ones would make, too. Pure.

    A loss is a rank that was killed, crashed, ended without a word, hung, or raised an exception that isn't one of
    evenstep's own about a mistake.
    """
    if failure is None:
        return False
    if failure.remote_failure is not None:
        return failure.remote_failure.is_loss
    if failure.hang is not None:
        return True
    if failure.only_secondary:
        return False
    report = failure.report
    return failure.root_cause.exit_code != 0 if report is None else report.exit_code == 1 and bool(report.traceback)


def is_known_here(failure: Failure) -> bool:
    """Whether this node knows why the attempt failed: it happened here, or to a node that can't say it. Pure."""
    if failure.remote_failure is not None:
        return failure.remote_failure.is_loss
    return failure.hang is not None or not failure.only_secondary


def lost_ranks(failure: Failure) -> tuple[int, ...]:
    """The ranks that ended by themselves, and not because another one did. Pure."""
    if failure.remote_failure is not None:
        return failure.remote_failure.lost
    secondary = {report.rank for report in failure.reports if report.is_consequence}
    return tuple(
        end.rank
        for end in failure.exits
        if end.exit_code != 0 and not end.stopped_by_launcher and end.rank not in secondary
    )
