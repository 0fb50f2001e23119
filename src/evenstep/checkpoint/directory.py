"""What one job knows of the directory of its run: which steps are there, and that nobody else writes here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from evenstep.checkpoint import folders
from evenstep.checkpoint.manifest import Manifest
from evenstep.checkpoint.plan import Policy, best_step, plan_removals
from evenstep.checkpoint.reader import DamagedError, read_manifest
from evenstep.checkpoint.storage import Storage
from evenstep.errors import CheckpointError, EvenstepError, UsageError
from evenstep.world import World


class RunDirectory:
    """The checkpoints of a run, as all its ranks see them; rank 0 alone changes anything.

    Attributes:
        steps: Those that have a checkpoint, with their metrics. On other ranks than 0 some may have been removed since.
        is_open: Whether this job has the lock.
    """

    def __init__(self, storage: Storage, world: World, policy: Policy) -> None:
        self.storage, self._world, self._policy = storage, world, policy
        self.steps: dict[int, Mapping[str, float]] = {}
        self.is_open = False
        self._release: Callable[[], None] | None = None

    @property
    def newest(self) -> int | None:
        """The newest step; None if there is none."""
        return max(self.steps, default=None)

    @property
    def best(self) -> float | None:
        """The best metric so far of those that were saved."""
        step = best_step(self.steps, self._policy) if self._policy.best is not None else None
        return None if step is None else self.steps[step][self._policy.best or ""]

    def open(self) -> None:
        """Collective: take the lock, clear up what a killed job has left, and look at what there is.

        Raises:
            CheckpointError: Another job has the lock, or nothing can be written here.
        """
        found: dict[int, Mapping[str, float]] = {}

        def look() -> None:
            self._release = self.storage.lock({"world_size": self._world.world_size})
            folders.sweep(self.storage)
            for step in folders.steps_in(self.storage):
                found[step] = {}
                try:
                    found[step] = read_manifest(self.storage, folders.folder_of(step)).metrics
                except DamagedError:
                    continue  # told when somebody wants to load it

        self._on_main(look)
        self.steps = dict(self._world.broadcast_object([[step, dict(metrics)] for step, metrics in found.items()]))
        self.is_open = True

    def look(self) -> list[int]:
        """Collective: the steps that have a checkpoint now, in ascending order; needs no lock.

        Raises:
            CheckpointError: The directory can't be looked at.
        """
        found: list[int] = []
        self._on_main(lambda: found.extend(folders.steps_in(self.storage)), cannot="be read")
        steps: list[int] = self._world.broadcast_object(found)
        return steps

    def close(self) -> None:
        """Give the lock back."""
        if self._release is not None:
            self._release()
            self._release = None

    def enter(self, manifest: Manifest) -> None:
        """On rank 0, in the writer's thread: a checkpoint has been committed; remove what need not be kept."""
        steps = {**self.steps, manifest.step: manifest.metrics}
        for step in plan_removals(steps, self._policy):
            if step != manifest.step:
                with contextlib.suppress(OSError):  # it is one too many, and the save has succeeded all the same
                    folders.remove_step(self.storage, step)
                del steps[step]
        self.steps = steps  # a new one: the loop may be looking at the old

    def note(self, step: int) -> None:
        """A checkpoint has been committed; rank 0 knows its metrics already."""
        self.steps = {step: {}, **self.steps}

    def discard(self, after: int) -> None:
        """Collective: remove the checkpoints of later steps."""
        later = [step for step in self.steps if step > after]

        def remove() -> None:
            for step in later:
                folders.remove_step(self.storage, step)

        self._on_main(remove)
        self.steps = {step: metrics for step, metrics in self.steps.items() if step <= after}

    def set_aside(self, step: int) -> str | None:
        """Collective: get a damaged checkpoint out of the way of those that come later; its new name, on rank 0."""
        self.steps = {other: metrics for other, metrics in self.steps.items() if other != step}
        return folders.set_aside(self.storage, step) if self._world.is_main else None

    def refuse_later_than(self, step: int) -> None:
        """Raise a UsageError if there are checkpoints of later steps: which of them would the next start take?"""
        if self.newest is not None and self.newest > step:
            raise UsageError(
                f"{self.storage.where} has checkpoints up to step {self.newest}, and this run is at step {step}: the "
                f"next start could not tell which to take. Call checkpoint.resume() before the loop, or "
                f"checkpoint.discard(after={step}) to remove the later ones, or use another directory."
            )

    def _on_main(self, work: Callable[[], None], cannot: str = "be written") -> None:
        """Collective: do something on rank 0; its error is raised everywhere."""
        problem: list[object] | None = None
        if self._world.is_main:
            try:
                work()
            except (OSError, EvenstepError) as error:
                problem = [isinstance(error, EvenstepError), str(error)]
        problem = self._world.broadcast_object(problem)
        if problem is not None:
            is_ours, text = problem
            where = self.storage.where
            raise CheckpointError(str(text) if is_ours else f"{where} can't {cannot}: {text} (on rank 0).")
