"""`Checkpointer`: saves while training runs, stops on request, and resumes exactly."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

from evenstep import checks
from evenstep import world as worlds
from evenstep.checkpoint.directory import DamagedError, RunDirectory
from evenstep.checkpoint.format.manifest import is_object_name
from evenstep.checkpoint.format.plan import Policy, is_better
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.format.tree import unwrapped
from evenstep.checkpoint.load import restore
from evenstep.checkpoint.load.fetch import recover
from evenstep.checkpoint.load.mirror import find_once
from evenstep.checkpoint.lock import step_of
from evenstep.checkpoint.save.commit import Saver
from evenstep.checkpoint.save.snapshot import models_among
from evenstep.checkpoint.save.stopping import Status, StatusExchange, StopSignals, note
from evenstep.checkpoint.store import LocalDirectory, Storage, storage_at
from evenstep.checkpoint.tier import LocalTier, refuse_inside, validate_local
from evenstep.console import say
from evenstep.data.loader import DataLoader
from evenstep.errors import EXIT_PREEMPTED, CheckpointError, ConfigurationError, MismatchError, UsageError
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.health import excepthook, heartbeat
from evenstep.ground.health.heartbeat import Note
from evenstep.ground.health.steps import count_optimizer_steps
from evenstep.ground.health.users_code import warn
from evenstep.transport.core.validation import forked_error
from evenstep.world import World, ended_well

VIRTUAL_RANKS = "virtual_ranks"
_TAKEN = {RANDOM: "the random streams", VIRTUAL_RANKS: "the virtual ranks of reproducible mode"}
_SLOW_STEP_S = 0.1


class _Stopped(SystemExit):
    """Raised to exit after all ranks have agreed to stop and a Checkpointer has saved."""


class Checkpointer:
    """Saves a run's objects while it trains, and resumes from the newest good checkpoint.

    Example::

        checkpoint = evenstep.Checkpointer("runs/digits", model=model, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        ...
            optimizer.step()
            checkpoint.step()

    It saves the given objects and every random stream of every rank. Replicated state is written once, split across the
    ranks. The loop waits only for a copy to memory; a thread writes the files. After SIGTERM, SIGUSR1, SIGUSR2, SIGHUP
    or `world.request_stop()` on any rank, all ranks save at the same step and exit with status 75; other Checkpointers
    of the world save at the end of its `with` block.

    Collective: every rank makes it, with the same arguments, and calls its methods in the same order. `step` is called
    equally often on all ranks: once after the optimizers of a step. Inside an accumulation window it does nothing.

    Args:
        directory: Where checkpoints are stored, a folder for each: a path (with several hosts on a shared file system),
            a URL that fsspec knows, such as "s3://bucket/run", or a `Storage`, which accepts fsspec's options.
        every_steps: Save after every this many steps; None: not by steps.
        every_minutes: Save when this many minutes have passed since the last save; None: not by time.
        keep: Number of newest checkpoints to keep.
        keep_every: Keep checkpoints of multiples of this many steps for good; None: of none.
        best: The name of a metric given to `step` or `save`: a checkpoint is saved and kept when the metric is better
            than all earlier values. The first save warns if the metric has not been given. If it was never given, the
            end of the run raises an error, after everything is saved.
        best_is: "lowest" or "highest".
        local: A directory on each node's own disk, for cheaper copies; its path may differ between nodes. A resume uses
            the newest step that the nodes together hold in full, or the newest checkpoint if that is newer. The guide
            explains how many steps a lost process or node costs. None: there are no copies.
        local_every_steps: Write these copies after every this many steps.
        asynchronous: Write in a thread; False: the loop waits until a checkpoint is complete.
        on_save_error: "raise": the next step raises the error; "continue": a line is printed and training continues.
        private: Only this user can read and write the files. False: the umask decides, so that a group may share them.
        world: The ranks that take part; None: the current world.
        objects: Objects to save, by name; they have `state_dict` and `load_state_dict`. A wrapped model is saved
            without its wrapper.

    Attributes:
        num_steps: Optimizer steps so far, including those before a resume.

    Raises:
        ConfigurationError: An argument is wrong. Raised on all ranks if it is wrong on one.
        MismatchError: The ranks were given different arguments. Raised on all ranks.
    """

    @excepthook.for_users
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
        local: str | os.PathLike[str] | LocalDirectory | None = None,
        local_every_steps: int | None = None,
        asynchronous: bool = True,
        on_save_error: str = "raise",
        private: bool = True,
        world: World | None = None,
        **objects: Any,
    ) -> None:
        self.world = worlds.chosen(world, "Checkpointer")

        def validate() -> dict[str, Any]:
            self.policy = Policy(every_steps, every_minutes, keep, keep_every, best, best_is, local_every_steps)
            self._local = _open_local(local, local_every_steps)
            checks.choice("on_save_error", on_save_error, ("raise", "continue"))
            checks.switch("asynchronous", asynchronous)
            checks.switch("private", private)
            _validate_objects(objects)
            storage = _open_storage(directory, private=private)
            if self._local is not None and isinstance(storage, LocalDirectory):
                refuse_inside(self._local, storage)
            options = {"asynchronous": bool(asynchronous), "on_save_error": on_save_error, "private": bool(private)}
            return _facts(storage, self.policy, self.world, objects, options)

        validate_on_all_ranks(self.world, "Checkpointer", validate)
        if self.world.virtual_ranks is not None:
            objects = {**objects, VIRTUAL_RANKS: self.world.virtual_ranks}
        storage = _open_storage(directory, private=private)
        self._directory = RunDirectory(storage, self.world, self.policy)
        self._objects = objects
        self._continues_on_error = on_save_error == "continue"
        self._asynchronous = bool(asynchronous)
        self._pid = os.getpid()
        self.num_steps = 0
        self._num_apart = 0  # steps since `num_steps` was last increased; with LocalSGD perhaps several
        self._has_uncounted_step = False  # an optimizer has stepped since the last call of `step`
        among = [getattr(each, "optimizer", each) for each in objects.values()]  # a LocalSGD has one, for example
        self._optimizers = [each for each in among if isinstance(each, Optimizer)]
        self._tier: LocalTier | None = None
        self._has_begun = self._has_loaded = False
        self._saver = Saver(storage, self.world, objects, self._directory.commit)
        self._directory.writer = self._saver.writer
        self._requests = StatusExchange(self.world)
        self._signals: StopSignals | None = None
        self._is_closed = False
        self._metrics: dict[str, float] = {}  # metrics given since the last checkpoint, or for its step
        self._metrics_are_of: int | None = None  # the step whose checkpoint has these metrics
        self._names_given: dict[str, None] = {}
        self._best: float | None = None
        # The best metric among complete checkpoints, and with the pending save: a failed save's metric doesn't count.
        self._best_saved: float | None = None
        self._best_pending: float | None = None
        self._lacks_best = best is not None  # until the metric is given
        self._has_warned_of_best = False
        self._last_saved: int | None = None
        self._saved_at = self._stepped_at = time.monotonic()
        self.world.at_end(self._world_ended)
        count_optimizer_steps(self._optimizer_stepped)

    # ------------------------------------------------------------------ before training

    def resume(self, *, strict: bool = True) -> int:
        """Load the newest good checkpoint; if there is none, start afresh.

        Collective. A damaged checkpoint is reported and kept, and the one before it is loaded. With `local`, the newest
        step may be one that the nodes together hold in full.

        Args:
            strict: False: load what fits, and print what didn't.

        Returns:
            Steps before the resume: 0 when starting afresh.

        Raises:
            CheckpointError: There are checkpoints but none is good; or the newest good checkpoint was saved from other
                objects (all differences are listed); or a rank can't read a checkpoint; or another job writes here.
        """
        self._agree("resume", lambda: {"strict": checks.switch("strict", strict)})
        self._open()
        self._finish_all()
        self._has_loaded = True
        problems = []
        for step in (*sorted(self._directory.steps, reverse=True), None):
            if self._tier is not None and (local := self._recover(self._tier, step, strict=strict)) is not None:
                return local
            if step is None:
                break
            try:
                return self._load(step, self._directory.folders[step], strict=strict, verb="resumed from")
            except DamagedError as error:
                problems.append(str(error))
                self._directory.pass_over(step, str(error))
                self._print(f"damaged, skipped and kept: {self._where}/{error}")
        if problems:
            lines = "\n  ".join(problems)
            raise CheckpointError(
                f"no checkpoint in {self._where} can be read:\n  {lines}\nTo start afresh, use another directory, or "
                f"remove this one's content."
            )
        self._print(f"no checkpoint in {self._where}: the run starts at the beginning")
        return 0

    def load(self, step: int, *, strict: bool = True) -> int:
        """Load the checkpoint of one step. Needs no write permission.

        Collective. To train on from there, `discard` the later checkpoints first.

        Args:
            step: A step that `evenstep checkpoint list` shows.
            strict: False: load what fits, and print what didn't.

        Returns:
            The step.

        Raises:
            CheckpointError: There is no checkpoint of this step, it is damaged, or it was saved from other objects.
        """
        self._agree("load", lambda: {"step": checks.whole("step", step), "strict": checks.switch("strict", strict)})
        self._finish_all()
        folders = self._directory.list_folders()
        if step not in folders:
            there = ", ".join(map(str, folders)) or "none at all"
            raise CheckpointError(f"{self._where} has no checkpoint of step {step!r}; there are: {there}.")
        self._has_loaded = True
        self._load(step, folders[step], strict=strict, verb="loaded")
        # A run that goes back gives the later steps up, and may be killed before its next save.
        if self._tier is not None:
            self._tier.remove(lambda folder: step_of(folder) <= step)
        return step

    def discard(self, *, after: int = 0) -> None:
        """Remove the checkpoints of later steps.

        Collective. Call it before a fresh start in a directory that has been used, or before training on from a loaded
        step.

        Args:
            after: Checkpoints of later steps are removed; 0: all.

        Raises:
            ConfigurationError: The step is negative or not a whole number. Raised on all ranks if it is wrong on one.
            MismatchError: The ranks pass different steps.
        """
        self._agree("discard", lambda: {"after": checks.whole("after", after, least=0)})
        self._open()
        self._finish_all()
        if self._tier is not None:
            self._tier.remove(lambda folder: step_of(folder) <= after)
        self._directory.discard(after)
        # The others don't know this job's metrics.
        self._best = self._best_saved = self.world.broadcast_object(self._directory.best)
        if self._last_saved is not None and self._last_saved > after:
            self._last_saved = None

    # ------------------------------------------------------------------ while training

    def step(self, **metrics: float) -> None:
        """Count a step of the optimizer, and save if a save is due.

        With `LocalSGD`, steps between two exchanges are counted at the second one, and a save that is due waits for it.

        Collective. An error leaves the model and the earlier checkpoints unchanged.

        Args:
            metrics: Numbers to store with the next checkpoint. All ranks pass the same names; rank 0's values are
                stored.

        Raises:
            CheckpointError: The save in the background has failed.
            UsageError: The directory has checkpoints of later steps than this one; or a later Checkpointer of this
                process saves there; or the model is in a `join`, whose ranks make different numbers of steps.
            SystemExit: With status 75: a stop was requested, and the run has been saved.
        """
        engines = [model.engine for model in models_among(self._objects)]
        if any(engine.is_in_window or not engine.synchronise for engine in engines):
            return
        self._num_apart += 1
        self._has_uncounted_step = False
        if any(engine.is_apart for engine in engines):
            return  # ranks differ until their next exchange, so a save that is due waits for it
        self._begin()
        self._commit_samples()
        if self._metrics_are_of == self.num_steps:
            self._metrics = {}
        before = self._count()
        now = time.monotonic()
        is_slow, self._stepped_at = now - self._stepped_at > _SLOW_STEP_S, now
        is_best = self._take_metrics(metrics)
        agreed = self._requests.receive(self._status(is_slow))
        for name in self._signals.replaced() if self._signals is not None else ():
            self._print(f"the script has replaced the handler of {name}: this signal no longer saves and stops the run")
        if agreed.failed:
            self._finish()
        if agreed.stops:
            self._stop()
        every = self.policy.every_steps
        by_steps = every is not None and self.num_steps // every > before // every
        if agreed.is_due or by_steps or is_best:
            self._save()
        if self._tier is not None:
            heartbeat.mark(heartbeat.Phase.SAVING)
            self._tier.step(self.num_steps, before, self._metrics, waits=not self._asynchronous)
            heartbeat.mark(heartbeat.Phase.BETWEEN_STEPS)
        self._requests.send(self._status(is_slow))

    def save(self, **metrics: float) -> None:
        """Save now, and return when the checkpoint is complete.

        Collective.

        Args:
            metrics: As in `step`.

        Raises:
            CheckpointError: The save has failed; also raised with `on_save_error="continue"`.
            UsageError: Called in the middle of an accumulation, whose gradients would be lost; or as for `step`.
        """
        if any(model.engine.is_accumulating for model in models_among(self._objects)):
            raise UsageError(
                "checkpoint.save in the middle of an accumulation: its gradients would be lost. Call it after the "
                "optimizer's step; with LocalSGD, after an exchange."
            )
        self._begin()
        self._count()
        self._take_metrics(metrics)
        self._save(waits=True, raises=True)

    def _optimizer_stepped(self, optimizer: Optimizer, has_ended: bool) -> None:
        """Note a step of an optimizer among the objects, or of any if there is none."""
        is_mine = not self._optimizers or any(each is optimizer for each in self._optimizers)
        self._has_uncounted_step |= has_ended and is_mine

    def _count(self) -> int:
        """Count the steps that ranks have made independently; returns the number of steps before."""
        before = self.num_steps
        self.num_steps += self._num_apart
        self._num_apart = 0
        return before

    def wait(self) -> None:
        """Wait until the background save has become a checkpoint. Collective.

        Raises:
            CheckpointError: The save has failed.
        """
        self._refuse_in_child()
        self._finish()

    def close(self) -> None:
        """Save once more if there were steps since the last save, and wait until it is written.

        Called at the end of the world's `with` block if that ends without an error, also by `sys.exit(0)`. Every rank
        calls it. Rank 0 waits for the parts that the other ranks write, and they wait for the checkpoint that rank 0
        makes of the parts. If another rank has failed, this rank prints that, and the other rank's own error ends the
        run.

        Does nothing in a process that was forked from the rank.

        Raises:
            CheckpointError: This rank knows that the last save has failed; also raised with `on_save_error="continue"`.
            UsageError: The metric named by `best` was never given, despite a warning. Everything is saved.
        """
        if self._is_closed or self._is_in_child:
            return
        self._is_closed = True
        try:
            self._save_rest()
        finally:
            self._release()
        if self._signals is not None:  # a signal that came after the last step
            self._signals.call_former()
        if self._lacks_best and self._has_warned_of_best:
            raise UsageError(
                f"Checkpointer: best={self.policy.best!r}, but no step or save has given a metric of that name (given: "
                f"{', '.join(self._names_given) or 'none'}), so no checkpoint was kept as the best. The last ones are "
                f"in {self._where}. Pass the metric, checkpoint.step(**{{{self.policy.best!r}: value}}), or leave best "
                f"out."
            )

    def _save_rest(self) -> None:
        """Save if there were steps since the last save, and wait. Every rank calls this, at any time."""
        if self._directory.is_open:
            is_good = self._finish_alone()
            is_apart = any(model.engine.is_apart for model in models_among(self._objects))
            if is_apart and self.world.rank == 0:
                warn(
                    f"Checkpointer: ranks differ since LocalSGD's last exchange, after step {self.num_steps}, so "
                    f"nothing was saved at the end. Call local.average() before the end.",
                )
            elif not is_apart:
                self._count()
            saves = not is_apart and self.num_steps > 0 and not self._directory.is_succeeded
            # All ranks know whether the previous save failed, so all agree on whether to save again.
            if saves and self._last_saved != self.num_steps and (is_good or self._continues_on_error):
                self._last_saved = self.num_steps
                self._saver.start(self.num_steps, self._metrics)
                is_good = self._finish_alone(raises=True)
            if self._tier is not None:
                self._tier.close(removes=is_good and saves)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._world_ended(error)

    @property
    def objects(self) -> Mapping[str, Any]:
        """The objects that are saved, by name."""
        return self._objects

    @property
    def blocked_s(self) -> float:
        """Seconds for which the last save blocked the loop, not counting the wait for the save before it."""
        return self._saver.blocked_s

    @property
    def _where(self) -> str:
        return self._directory.storage.where

    @property
    def _is_in_child(self) -> bool:
        """Whether this process was forked from the rank: it has the rank's lock and folder names, and must not save."""
        return os.getpid() != self._pid

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
        self._finish()  # `raises` is about this save
        if self._lacks_best and not self._has_warned_of_best:
            self._has_warned_of_best = True
            self._print(f"best={self.policy.best!r}: no step or save has given this metric yet")
        self._last_saved, self._saved_at = self.num_steps, time.monotonic()
        self._best_pending = self._best
        self._metrics_are_of = self.num_steps
        heartbeat.mark(heartbeat.Phase.SAVING)
        self._saver.start(self.num_steps, self._metrics)
        heartbeat.mark(heartbeat.Phase.BETWEEN_STEPS)
        if waits or not self._asynchronous:
            self._finish(raises=raises)

    def _finish(self, *, raises: bool = False) -> None:
        """Collective: wait for the pending save; raise or print its failure."""
        heartbeat.mark(heartbeat.Phase.SAVING)
        was_pending = self._saver.writer.is_pending
        failure = self._saver.finish()
        if failure is None and was_pending and self._last_saved is not None:
            self._directory.add_step(self._last_saved, self._saver.folder)
            self._best_saved = self._best_pending
        heartbeat.mark(heartbeat.Phase.BETWEEN_STEPS)
        self._report_failure(failure, raises=raises)

    def _finish_all(self) -> None:
        """Collective: wait for the pending saves, also on the nodes' disks, before a load changes the objects."""
        self._finish()
        if self._tier is not None:
            self._tier.finish()

    def _finish_alone(self, *, raises: bool = False) -> bool:
        """Wait for the pending save on this rank, raise or print its failure, and return whether it has succeeded.

        If the run ends here and only another rank's part is missing, nothing is raised: the other rank's error ends the
        run, or the other rank has made more steps.
        """
        failure, by_peer = self._saver.finish_alone()
        self._report_failure(failure, raises=raises, is_only_printed=by_peer)
        return failure is None

    def _report_failure(self, failure: str | None, *, raises: bool = False, is_only_printed: bool = False) -> None:
        if failure is None:
            return
        step, self._last_saved = self._last_saved, None
        if self._best == self._best_pending:
            self._best = self._best_saved
        newest = self._directory.newest
        kept = "there is none yet" if newest is None else f"the newest checkpoint is {self._directory.folders[newest]}"
        where = f"{self._where}: {failure}".rstrip(".")
        text = f"step {step} could not be saved in {where}. Its incomplete files are removed; {kept}"
        if is_only_printed:
            self._print(f"{text}.")
            return
        if raises or not self._continues_on_error:
            raise CheckpointError(f"{text}.")
        self._print(f"{text}. Training continues.")

    def _commit_samples(self) -> None:
        """Count the samples of a skipped step (by a GradScaler): no loader commits them without an optimizer step."""
        for value in self._objects.values():
            if isinstance(value, DataLoader):
                value.commit()

    def _stop(self) -> None:
        note(Note.STOPS)
        reasons = self.world.exchange(self.world.stop_reason)
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        self.world.stop_reason = None  # handled: a notebook may continue
        self._finish()
        if self._last_saved != self.num_steps:  # also if the pending save of this step has just failed
            self._save(waits=True, raises=True)
        self._is_closed = True
        if self._tier is not None:
            self._tier.close(removes=True)
        folder = self._directory.folders[self.num_steps]
        self._print(f"stop requested ({reason} on rank {rank}); saved {self._where}/{folder}, which resumes there")
        self._requests.finish()
        if self._signals is not None:
            try:
                self._signals.call_former()
            except SystemExit as former:
                raise _Stopped(former.code) from None
        raise _Stopped(EXIT_PREEMPTED)

    def _take_metrics(self, metrics: Mapping[str, float]) -> bool:
        """Collective if there are metrics: store rank 0's; returns whether they are the best so far."""
        if not metrics:
            return False
        self._metrics = {**self._metrics, **_agree_on_metrics(self.world, metrics)}
        self._names_given |= dict.fromkeys(metrics)
        self._lacks_best = self._lacks_best and self.policy.best not in metrics
        value = self._metrics.get(self.policy.best or "", math.nan) if self.policy.best in metrics else math.nan
        if not is_better(value, self._best, self.policy):
            return False
        self._best, self._lacks_best = value, False
        return True

    # ------------------------------------------------------------------ the directory

    def _refuse_in_child(self) -> None:
        if self._is_in_child:
            raise forked_error(self.world.rank)

    def _agree(self, method: str, validate: Callable[[], dict[str, Any]]) -> None:
        self._refuse_in_child()
        validate_on_all_ranks(self.world, f"Checkpointer.{method}", validate)

    def _open(self) -> None:
        """Collective, once: lock the directory for this job, and list its checkpoints."""
        if self._is_closed:
            raise UsageError("this Checkpointer is closed: its world has ended. Make a new one.")
        if not self._directory.is_open:
            number = self._directory.open()
            self._saver.open(number)
            if self._local is not None:
                run = f"{_identity(self._directory.storage, is_one_host=True)}\n{self._directory.run}"
                every = self.policy.local_every_steps or 1
                self._tier = LocalTier(self._local, every, self.world, self._objects, number, run)
            self._best = self._best_saved = self._directory.best
            self._lacks_best = self._lacks_best and self._best is None
            self._signals = StopSignals(self.world)

    def _begin(self) -> None:
        """Collective, before each step and save: open the directory.

        The first call decides which of the directory's checkpoints count.
        """
        self._refuse_in_child()
        self._open()
        if self._directory.is_succeeded:
            raise UsageError(
                f"a later Checkpointer of this process saves to {self._where}, so this one saves nothing more there. "
                f"Use the later one, or give each its own directory."
            )
        self._directory.refuse_later_than(self.num_steps)  # also after `load` of an older step in the middle of a run
        _validate_local(self._objects)
        if self.world.world_size > 1 and any(model._join_config.enable for model in models_among(self._objects)):
            raise UsageError(
                "checkpoint inside model.join(): a rank that has run out of batches only takes part in the others' "
                "gradients, and they would wait for it here. Call checkpoint.save() after the block, or give all ranks "
                "equally many batches (evenstep.DataLoader does), so that you need no join."
            )
        if not self._has_begun:
            if self._tier is not None and not self._has_loaded:
                self._directory.refuse_later_than(self.num_steps, self._tier.newest())
            self._directory.note_resume(self.num_steps, is_local=self._tier is not None)
            if self._tier is not None:
                self._tier.begin()
            self._has_begun = True

    def _recover(self, tier: LocalTier, durable_step: int | None, *, strict: bool) -> int | None:
        """Collective: load the newest step that the nodes hold, if it is newer than the newest checkpoint."""
        resumes = self._directory.resumes
        found = recover(
            tier.storage, self.world, self._objects, resumes=resumes, durable_step=durable_step, strict=strict
        )
        if found is None:
            return None
        # The directory's checkpoints don't include this step and its metrics.
        tier.kept, self._last_saved, self._metrics_are_of = found[0], None, None
        text = f"resumed from the local copies of step {found[1].manifest.step} (durable: {durable_step or 'none'})"
        return self._apply(found[1], f"{tier.storage.where}/{found[0]}", text, is_resume=True)

    def _load(self, step: int, folder: str, *, strict: bool, verb: str) -> int:
        found = find_once(self._directory.storage, self.world, folder, self._objects, strict=strict)
        self._last_saved, self._metrics_are_of = step if self._directory.is_open else None, step
        return self._apply(
            found, f"{self._where}/{folder}", f"{verb} {self._where}/{folder}", is_resume=verb != "loaded"
        )

    def _apply(self, found: restore.Found, where: str, line: str, *, is_resume: bool) -> int:
        """Collective: load the found state, print a line, and return its step."""
        restore.apply(found, self.world, self._objects, where)
        step = self.num_steps = found.manifest.step
        self._num_apart = 0
        self._metrics = dict(found.manifest.metrics)
        num_ranks = found.manifest.world_size
        saved_by = f", saved by {checks.counted(num_ranks, 'rank')}"
        ranks = "" if num_ranks == self.world.world_size else saved_by
        lost = self._tier.reached - step if is_resume and self._tier is not None else 0
        repeated = f"; {checks.counted(lost, 'step')} repeated" if lost > 0 else ""
        self._print(f"{line}{ranks}{repeated}")
        for line in found.misfits:
            self._print(f"  not loaded: {line}")
        for name in found.unlisted:
            self._print(f"  {where}/{name} isn't a part of it, and was left alone")
        return step

    # ------------------------------------------------------------------ the end

    def _world_ended(self, error: BaseException | None) -> None:
        if ended_well(error) or self._is_in_child:
            self.close()
            return
        was_closed, self._is_closed = self._is_closed, True
        try:
            is_current = self._directory.is_open and not self._directory.is_succeeded
            if isinstance(error, _Stopped) and not was_closed and is_current:
                # Another Checkpointer has stopped the run, on all ranks at the same step: before this one's `step`, if
                # an optimizer has stepped since the last.
                self._num_apart += self._has_uncounted_step
                self._save_rest()
                self._print(f"saved {self._where}, too")
        finally:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        # Finish the pending save if all ranks still can. No other save begins.
        if not isinstance(error, SystemExit):  # after SystemExit signals must stay harmless until the process ends
            self._saver.abandon()
            if self._tier is not None:
                self._tier.abandon()
            if self._signals is not None:
                self._signals.close()
        self._directory.close(after=self._saver.writer.thread)

    def _release(self) -> None:
        self.world.cancel_at_end(self._world_ended)
        if self._signals is not None:
            self._signals.close()
        self._directory.close()

    def _print(self, text: str) -> None:
        if self.world.is_main:
            say(f"evenstep: {text}")


def _open_local(local: Any, every_steps: int | None) -> LocalDirectory | None:
    """The directory for the argument `local`.

    Raises:
        ConfigurationError: `local` isn't a directory that this user can use; or one of the two arguments is missing.
    """
    if local is None and every_steps is None:
        return None
    is_url = "://" in str(local) and not str(local).startswith("file:")
    if not isinstance(local, str | os.PathLike | LocalDirectory | None) or is_url or local == "":
        wanted = "the path of a directory on each node's own disk. An object to save takes another name"
        raise checks.refuse("local", local, wanted)
    if local is None or every_steps is None:
        raise ConfigurationError(
            "pass both local (where copies are stored) and local_every_steps (how often they are written)."
        )
    storage = _open_storage(local, private=True, what="local")
    assert isinstance(storage, LocalDirectory)
    validate_local(storage)
    return storage


def _open_storage(directory: Any, *, private: bool, what: str = "directory") -> Storage:
    """The storage for the argument `directory`.

    Raises:
        ConfigurationError: `directory` is neither a path, a URL nor a `Storage`; or `private` can't be used with it.
    """
    if isinstance(directory, str | os.PathLike):
        path = os.fspath(directory)
        if isinstance(path, str) and path and "\0" not in path:
            return storage_at(path, private=private)
    elif isinstance(directory, Storage):
        if not private:
            raise ConfigurationError(
                "private=False is for the path of a directory, but a Storage was passed. Set it on the Storage, as in "
                "LocalDirectory(path, private=False)."
            )
        return directory
    raise checks.refuse(what, directory, "the path of a directory, a URL, or a Storage")


def _validate_objects(objects: Mapping[str, Any]) -> None:
    """Refuse objects that can't be saved.

    Raises:
        ConfigurationError: There are no objects, an object has no state, or its name is taken.
    """
    if not objects:
        raise ConfigurationError("there is nothing to save. Pass objects by name: model=model, ...")
    for name, value in objects.items():
        if not is_object_name(name):
            raise ConfigurationError(
                f"{name!r} names an object; a name is a word of at most 100 letters of ASCII, digits and _, as in "
                f"model=model. Files are named after it."
            )
        if name in _TAKEN:
            raise ConfigurationError(f"{name}= is the name of {_TAKEN[name]}; use another one.")
        target = unwrapped(value)
        lacks = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(target, method, None))]
        if lacks:
            raise ConfigurationError(f"{name}= is a {type(value).__name__} without {' and '.join(lacks)}.")


def _validate_local(objects: Mapping[str, Any]) -> None:
    """Refuse to save a run with local steps unless its `LocalSGD` is among the objects.

    Raises:
        UsageError: The model's `LocalSGD` is missing; or its optimizer is among the objects, too.
    """
    for model in models_among(objects):
        local: Any = model.engine.ending.owner
        if local is None:
            continue
        if not any(each is local for each in objects.values()):
            raise UsageError(
                "the model has a LocalSGD, whose ranks have different momenta. Pass the LocalSGD to the Checkpointer "
                "instead of its optimizer: Checkpointer(..., model=model, local_sgd=local)."
            )
        name = next((name for name, each in objects.items() if each is local.optimizer), None)
        if name is not None:
            raise UsageError(
                f"{name}= is the optimizer of a LocalSGD, which saves the optimizer's state on every rank. Leave it "
                f"out."
            )


def _facts(
    storage: Storage, policy: Policy, world: World, objects: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments that must be equal on all ranks, by the names for messages; JSON types."""
    return {
        "the directory": _identity(storage, is_one_host=world.num_nodes == 1),
        **asdict(policy),
        **options,
        "what is saved": ", ".join(sorted(objects)),
    }


def _identity(storage: Storage, *, is_one_host: bool) -> str:
    if not isinstance(storage, LocalDirectory):
        return storage.where
    # Don't resolve links: their targets may differ between hosts that mount the same file system at different places.
    return os.path.realpath(storage.root) if is_one_host else os.fspath(storage.root)


def _agree_on_metrics(world: World, given: Mapping[str, Any]) -> dict[str, float]:
    """Collective: rank 0's metrics. Every rank passes its own values under the same names.

    Raises:
        ConfigurationError: A value isn't a number. Raised on all ranks.
        MismatchError: The names differ. Raised on all ranks.
    """
    mine: dict[str, Any] = {
        name: float(value) if checks.is_switch_type(value) else checks.as_float(value) for name, value in given.items()
    }
    wrong = [name for name, value in mine.items() if value is None]
    problem = f"metric {wrong[0]}={checks.shown(given[wrong[0]])} isn't a number." if wrong else None
    seen = world.exchange({"problem": problem, "metrics": mine})
    for rank, each in enumerate(seen):
        if each["problem"] is not None:
            raise ConfigurationError(f"checkpoint on rank {rank}: {each['problem']}")
        if sorted(each["metrics"]) != sorted(seen[0]["metrics"]):
            raise MismatchError(
                f"checkpoint: the metrics are {', '.join(seen[0]['metrics'])} on rank 0 and "
                f"{', '.join(each['metrics'])} on rank {rank}. Pass the same names on all ranks; rank 0's values are "
                f"stored."
            )
    metrics: dict[str, float] = seen[0]["metrics"]
    return metrics
