"""`Checkpointer`: saves while training runs, stops when asked, and resumes exactly."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from evenstep import checks
from evenstep import world as worlds
from evenstep.checkpoint import arguments, folders, restoring
from evenstep.checkpoint.directory import RunDirectory
from evenstep.checkpoint.plan import Policy, is_better
from evenstep.checkpoint.reader import DamagedError
from evenstep.checkpoint.rehearsal import Rehearsal
from evenstep.checkpoint.saving import Saver
from evenstep.checkpoint.stopping import Agreement, Status, StopSignals
from evenstep.checkpoint.storage import Storage
from evenstep.errors import EXIT_PREEMPTED, CheckpointError, UsageError
from evenstep.health import page
from evenstep.transport.agreement import validate_together
from evenstep.world import World

_SLOW_STEP_S = 0.1


class Checkpointer:
    """Saves a run's objects now and then, when asked to stop, and at its end; resumes from the newest good checkpoint.

        checkpoint = evenstep.Checkpointer("runs/digits", model=model, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        ...
            optimizer.step()
            checkpoint.step()

    Saved are the given objects and every random stream of every rank. Of what all ranks have one copy is written, each
    rank writing a part. The loop waits for a copy to memory only; files are written behind it. SIGTERM, SIGUSR1 or
    `world.request_stop()` on any rank: all ranks save at the same step and leave with status 75.

    Collective: every rank makes it, with the same arguments, and calls its methods in the same order. `step` is called
    equally often on all ranks: once after each step of the optimizer. Within an accumulation it does nothing.

    Args:
        directory: Where checkpoints lie, a folder per step; or a `Storage`. On several hosts: a shared file system.
        every_steps: Save after each so many steps; None: not by steps.
        every_minutes: Save when so many minutes have passed since the last save; None: not by time.
        keep: The newest so many are kept.
        keep_every: What is saved at a multiple of this many steps is kept for good; None: nothing.
        best: The name of a metric given to `step` or `save`: what beats all before is saved and kept. It is said at the
            first save if nobody has given it by then; at the end that is an error, after everything is saved.
        best_is: "lowest" or "highest".
        asynchronous: Write behind the loop; False: the loop waits until a checkpoint is whole.
        on_save_error: "raise", in the next step; "continue" prints a line and trains on.
        world: Who takes part; None: the current world.
        objects: What is saved, by name: whatever has `state_dict` and `load_state_dict`. A wrapped model is saved
            without its wrapper.

    Attributes:
        num_steps: Steps made, those before a resume included.

    Raises:
        ConfigurationError: An argument is wrong. Raised on all ranks if it is wrong on one.
        MismatchError: The ranks were given different arguments. Raised on all of them.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = 10.0,
        keep: int = 3,
        keep_every: int | None = None,
        best: str | None = None,
        best_is: str = "lowest",
        asynchronous: bool = True,
        on_save_error: str = "raise",
        world: World | None = None,
        **objects: Any,
    ) -> None:
        self.world = worlds.chosen(world, "Checkpointer")

        def validate() -> dict[str, Any]:
            self.policy = Policy(every_steps, every_minutes, keep, keep_every, best, best_is)
            checks.choice("on_save_error", on_save_error, ("raise", "continue"))
            checks.switch("asynchronous", asynchronous)
            arguments.validate_objects(objects)
            storage = arguments.open_storage(directory)
            options = {"asynchronous": bool(asynchronous), "on_save_error": on_save_error}
            return arguments.facts(storage, self.policy, self.world, objects, options)

        validate_together(self.world, "Checkpointer", validate)
        if self.world.lanes is not None:
            objects = {**objects, arguments.LANES: self.world.lanes}
        self._rehearsal = Rehearsal.of_this_process(self.world, objects)
        storage = arguments.open_storage(directory if self._rehearsal is None else self._rehearsal.directory)
        self._directory = RunDirectory(storage, self.world, self.policy)
        self._objects = objects
        self._continues_on_error = on_save_error == "continue"
        self._asynchronous = bool(asynchronous)
        self.num_steps = 0
        self._saver = Saver(storage, self.world, objects, self._directory.enter)
        self._agreement = Agreement(self.world)
        self._signals: StopSignals | None = None
        self._is_closed = False
        self._metrics: dict[str, float] = {}
        self._best: float | None = None
        self._lacks_best = best is not None  # as long as nobody has given that metric
        self._has_told_of_best = False
        self._last_saved: int | None = None
        self._saved_at = self._stepped_at = time.monotonic()
        self.world.at_end(self._world_ended)

    # ------------------------------------------------------------------ before training

    def resume(self, *, strict: bool = True) -> int:
        """Go on from the newest good checkpoint; with none, start afresh.

        Collective. A damaged checkpoint is set aside and said so, and the one before it is taken.

        Args:
            strict: False: load what fits, and say what didn't.

        Returns:
            The steps that were made before: 0 when starting afresh.

        Raises:
            CheckpointError: There are checkpoints, and none is good; or the newest good one is not of these objects,
                with all differences; or another job writes here.
        """
        self._agree("resume", lambda: {"strict": checks.switch("strict", strict)})
        self._open()
        problems = []
        for step in sorted(self._directory.steps, reverse=True):
            try:
                return self._load(step, strict=strict, told="resumed from")
            except DamagedError as error:
                problems.append(str(error))
                name = self._directory.set_aside(step)
                aside = "" if name is None else f"; set aside as {self._where}/{name}"
                self._print(f"damaged: {error}{aside}")
        if problems:
            told = "\n  ".join(problems)
            raise CheckpointError(
                f"no checkpoint in {self._where} can be read:\n  {told}\nTo start afresh, use another "
                f"directory, or remove what is in this one."
            )
        return 0

    def load(self, step: int, *, strict: bool = True) -> int:
        """Load the checkpoint of one step; needs no permission to write.

        Collective. To train on from there, `discard` the later ones first.

        Args:
            step: One of those that `evenstep checkpoint list` shows.
            strict: False: load what fits, and say what didn't.

        Returns:
            The step.

        Raises:
            CheckpointError: There is none of this step, it is damaged, or it is not of these objects.
        """
        self._agree("load", lambda: {"step": checks.whole("step", step), "strict": checks.switch("strict", strict)})
        steps = self._directory.look()
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none at all"
            raise CheckpointError(f"{self._where} has no checkpoint of step {step!r}; there are: {there}.")
        return self._load(step, strict=strict, told="loaded")

    def discard(self, *, after: int = 0) -> None:
        """Remove the checkpoints of later steps: to start afresh in a directory that has been used, or from a step
        that was loaded.

        Collective.

        Args:
            after: Those of later steps go; 0: all.

        Raises:
            ConfigurationError: It is negative or no whole number. Raised on all ranks if it is so on one.
            MismatchError: The ranks give different steps.
        """
        self._agree("discard", lambda: {"after": checks.whole("after", after, least=0)})
        self._open()
        self._finish()
        self._directory.discard(after)
        self._best = self._directory.best

    # ------------------------------------------------------------------ while training

    def step(self, **metrics: float) -> None:
        """Count a step of the optimizer; save when that is due.

        Collective. After an error the model is as it was, and the checkpoints of before are kept.

        Args:
            metrics: Numbers to be kept with the next checkpoint, rank 0's; all ranks give the same names.

        Raises:
            CheckpointError: The save that was written behind has failed.
            UsageError: The directory has checkpoints of later steps than this one.
            SystemExit: With status 75: the run was asked to stop, and has been saved.
        """
        if any(model.engine.is_accumulating for model in arguments.wrapped_models(self._objects)):
            return
        self._open()
        if self._last_saved is None:
            self._directory.refuse_later_than(self.num_steps)
        arguments.validate_local(self._objects)
        self._commit_samples()
        self.num_steps += 1
        now = time.monotonic()
        is_slow, self._stepped_at = now - self._stepped_at > _SLOW_STEP_S, now
        is_best = self._note(metrics)
        agreed = self._agreement.hear(self._status(is_slow))
        if self._rehearsal is not None:
            self._rehearsal.step(self.num_steps)
        if agreed.failed:
            self._finish()
        if agreed.stops:
            self._stop()
        by_steps = self.policy.every_steps is not None and self.num_steps % self.policy.every_steps == 0
        if agreed.is_due or by_steps or is_best or (self._rehearsal and self._rehearsal.saves_at(self.num_steps)):
            self._save(waits=self._rehearsal is not None)
        self._agreement.say(self._status(is_slow))

    def save(self, **metrics: float) -> None:
        """Save now, and return when the checkpoint is whole.

        Collective.

        Args:
            metrics: As in `step`.

        Raises:
            CheckpointError: It could not be saved, also with `on_save_error="continue"`.
            UsageError: In the middle of an accumulation, whose gradients would be lost.
        """
        if any(model.engine.is_accumulating for model in arguments.wrapped_models(self._objects)):
            raise UsageError(
                "checkpoint.save in the middle of an accumulation: its gradients would be lost. Call it after the "
                "optimizer's step; of LocalUpdates, behind an average."
            )
        self._open()
        if self._last_saved is None:
            self._directory.refuse_later_than(self.num_steps)
        arguments.validate_local(self._objects)
        self._note(metrics)
        self._save(waits=True, raises=True)

    def wait(self) -> None:
        """Return when the save that is being written is a checkpoint. Collective.

        Raises:
            CheckpointError: It has failed.
        """
        self._finish()

    def close(self) -> None:
        """A last save, if steps were made since the last one; return when it is written.

        Called at the end of the world's `with` block when that ends well. Every rank calls it; ranks don't wait for
        each other, but rank 0 for the parts of all.

        Raises:
            CheckpointError: It has failed, as far as this rank knows.
            UsageError: The metric that `best` names was never given, and that was told before. All is saved.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._directory.is_open:
                self._tell_failure(self._saver.finish_alone())
                if self.num_steps > 0 and self._last_saved != self.num_steps:
                    self._saver.start(self.num_steps, self._metrics)
                    self._tell_failure(self._saver.finish_alone())
        finally:
            self._let_go()
        if self._lacks_best and self._has_told_of_best:
            raise UsageError(
                f"Checkpointer: best={self.policy.best!r}, but no step or save has given a metric of that name (given: "
                f"{', '.join(self._metrics) or 'none'}), so no checkpoint was kept as the best. The last ones are in "
                f"{self._where}. Pass it, checkpoint.step(**{{{self.policy.best!r}: value}}), or leave best out."
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._world_ended(error)

    @property
    def blocked_s(self) -> float:
        """How long the last save kept the loop from going on, in seconds, apart from waiting for the one before."""
        return self._saver.blocked_s

    @property
    def _where(self) -> str:
        return self._directory.storage.where

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "saving" if self._saver.writer.is_busy else "idle"
        return f"<Checkpointer {self._where} at step {self.num_steps}, {state}: {', '.join(self._objects)}>"

    # ------------------------------------------------------------------ saving

    def _status(self, is_slow: bool) -> Status:
        minutes, main = self.policy.every_minutes, self.world.is_main
        return Status(
            stops=self.world.stop_reason is not None,
            failed=self._saver.writer.has_failed,
            is_due=main and minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes,
            is_slow=main and is_slow,
        )

    def _save(self, *, waits: bool = False, raises: bool = False) -> None:
        self._finish(raises=raises)
        if self._lacks_best and not self._has_told_of_best:
            self._has_told_of_best = True
            self._print(f"best={self.policy.best!r}: no step or save has given this metric yet")
        self._last_saved, self._saved_at = self.num_steps, time.monotonic()
        page.mark(page.Phase.SAVING)
        self._saver.start(self.num_steps, self._metrics)
        page.mark(page.Phase.BETWEEN_STEPS)
        if waits or not self._asynchronous:
            self._finish(raises=raises)

    def _finish(self, *, raises: bool = False) -> None:
        """Collective: wait for the pending save, and deal with its failure."""
        page.mark(page.Phase.SAVING)
        was_pending = self._saver.writer.is_pending
        failure = self._saver.finish()
        if failure is None and was_pending and self._last_saved is not None:
            self._directory.note(self._last_saved)
        page.mark(page.Phase.BETWEEN_STEPS)
        self._tell_failure(failure, raises=raises)

    def _tell_failure(self, failure: str | None, *, raises: bool = False) -> None:
        if failure is None:
            return
        step, self._last_saved = self._last_saved, None
        newest = self._directory.newest
        kept = "there is none yet" if newest is None else f"the newest checkpoint is {folders.folder_of(newest)}"
        where = f"{self._where}: {failure}".rstrip(".")
        text = f"step {step} could not be saved in {where}. What was written of it is removed; {kept}"
        if raises or not self._continues_on_error:
            raise CheckpointError(f"{text}.")
        self._print(f"{text}. Training goes on.")

    def _commit_samples(self) -> None:
        """A step that a GradScaler left out has used its samples too; no optimizer has told the loader."""
        for value in self._objects.values():
            if type(value).__module__.startswith("evenstep.data.") and hasattr(value, "commit"):
                value.commit()

    def _stop(self) -> None:
        reasons = self.world.exchange(self.world.stop_reason)
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        self.world.stop_reason = None  # heard: a notebook may go on
        if self._last_saved != self.num_steps:
            self._save(waits=True, raises=True)
        self._finish(raises=True)
        self._is_closed = True
        folder = folders.folder_of(self.num_steps)
        self._print(f"asked to stop ({reason} on rank {rank}); saved {self._where}/{folder}, which resumes there")
        self._agreement.finish()
        raise SystemExit(EXIT_PREEMPTED)

    def _note(self, metrics: Mapping[str, float]) -> bool:
        """Collective if there are metrics: remember rank 0's. Whether they are the best so far."""
        if not metrics:
            return False
        self._metrics = {**self._metrics, **arguments.agree_on_metrics(self.world, metrics)}
        self._lacks_best = self._lacks_best and self.policy.best not in metrics
        value = self._metrics.get(self.policy.best or "", math.nan) if self.policy.best in metrics else math.nan
        if not is_better(value, self._best, self.policy):
            return False
        self._best = value
        return True

    # ------------------------------------------------------------------ what lies there

    def _agree(self, method: str, validate: Callable[[], dict[str, Any]]) -> None:
        validate_together(self.world, f"Checkpointer.{method}", validate)

    def _open(self) -> None:
        """Collective, once: this job alone writes here, and knows what there is."""
        if self._is_closed:
            raise UsageError("this Checkpointer is closed: its world has ended. Make a new one.")
        if not self._directory.is_open:
            self._directory.open()
            self._saver.open()
            self._best = self._directory.best
            self._lacks_best = self._lacks_best and self._best is None
            self._signals = StopSignals(self.world)

    def _load(self, step: int, *, strict: bool, told: str) -> int:
        found = restoring.find(self._directory.storage, self.world, step, self._objects, strict=strict)
        where = f"{self._where}/{folders.folder_of(step)}"
        restoring.apply(found, self.world, self._objects, where)
        self.num_steps = found.manifest.step
        self._last_saved = step if self._directory.is_open else None
        self._metrics = dict(found.manifest.metrics)
        num_ranks = found.manifest.world_size
        saved_by = f", saved by {checks.counted(num_ranks, 'rank')}"
        ranks = "" if num_ranks == self.world.world_size else saved_by
        self._print(f"{told} {where}{ranks}")
        for line in found.misfits:
            self._print(f"  not loaded: {line}")
        for name in found.unlisted:
            self._print(f"  {where}/{name} is no part of it, and was left alone")
        return step

    # ------------------------------------------------------------------ the end

    def _world_ended(self, error: BaseException | None) -> None:
        if error is None:
            self.close()
            return
        # What is pending is finished if all ranks still can; nothing new is begun.
        self._is_closed = True
        if isinstance(error, SystemExit):
            if not self._saver.writer.is_busy:
                self._directory.close()  # signals stay harmless until the process has gone
            return
        self._saver.abandon()
        if self._signals is not None:
            self._signals.close()

    def _let_go(self) -> None:
        if self._signals is not None:
            self._signals.close()
        self._directory.close()

    def _print(self, text: str) -> None:
        if self.world.is_main:
            print(f"evenstep: {text}", file=sys.stderr, flush=True)  # noqa: T201
