"""Optimizers' steps and compilations, seen by torch's global hooks; and stragglers, found from pages.

One pair of hooks serves the page and all recorders. It is never removed: torch iterates over its hooks while an
optimizer steps, and would fail if the garbage collector removed a hook meanwhile.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenstep.console import say
from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Placement, current_placement, is_claimed, lacks_servers
from evenstep.ground.health import heartbeat, peer_heartbeats
from evenstep.ground.health.heartbeat import Heartbeat, Phase, mark

_POLL_EVERY_STEPS = 16
WINDOW_S = 10.0


_is_watching = _is_told_of_compiling = False
Listener = Callable[[Optimizer, bool], None]  # the flag: whether the step has ended

_listeners: list[weakref.WeakMethod[Listener]] = []
_num_batches = 0
_counts: dict[int, int] = {}  # steps of each existing optimizer, by id: weak keys would take twice the time


def count_optimizer_steps(listener: Listener | None = None) -> None:
    """From now on, write optimizers' steps to the page: the phase, and the largest step count.

    A second call only adds a listener.

    Args:
        listener: A method that is also called, as long as its object lives.
    """
    global _is_watching
    if listener is not None:
        _listeners[:] = [each for each in _listeners if each() is not None] + [weakref.WeakMethod(listener)]
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_optimizer_begins)
        register_optimizer_step_post_hook(_optimizer_ended)


def mark_end_of_group() -> None:
    """Wrap torch's `destroy_process_group` so that this rank's page records a normal end.

    Peers that still wait for this rank see their connections close, as after a crash. The page tells the two apart.
    """
    if not dist.is_available():
        return
    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(destroy)
    def leave(group: Any = None) -> None:
        # A rank that fails also calls this: while its error is handled, or when python ends after it.
        has_failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
        if (group is None or group is dist.group.WORLD) and not has_failed:
            mark(Phase.ENDED)
        destroy(group)

    dist.destroy_process_group = distributed_c10d.destroy_process_group = leave


def _optimizer_begins(optimizer: Optimizer, *_: object) -> None:
    mark(Phase.OPTIMIZER)
    _call_listeners(optimizer, False)


def _optimizer_ended(optimizer: Any, *_: object) -> None:
    _call_listeners(optimizer, True)
    if heartbeat.current is None:
        return
    key = id(optimizer)
    if key not in _counts:
        _counts[key] = 0
        weakref.finalize(optimizer, _counts.pop, key).atexit = False
    _counts[key] += 1
    most = max(_counts.values())
    mark(Phase.BETWEEN_STEPS, step=most)
    if most % _POLL_EVERY_STEPS == 0:
        mark_compilations()
        if most == _POLL_EVERY_STEPS:
            validate_roles()
            for line in find_misuse(current_placement()):
                say(f"evenstep: {line}")
        _watch.poll(time.monotonic())


def find_misuse(placement: Placement) -> list[str]:
    """Lines for rank 0 to print, once it trains, if several ranks were started but don't train together."""
    lines = []
    if placement.rank == 0 and placement.world_size > 1 and not (is_claimed() or torch.distributed.is_initialized()):
        lines.append(
            f"{placement.world_size} ranks train independent copies: the script has called neither evenstep.init nor "
            f"torch.distributed.init_process_group. Call one of them, or start one rank."
        )
    return lines


def validate_roles() -> None:
    """Raise if the command wants servers, but all ranks train.

    Raises:
        ConfigurationError: All ranks train.
    """
    if lacks_servers():
        raise ConfigurationError(
            "--servers (EVENSTEP_SERVERS): the script trains without evenstep.parameter_server, so no rank is a "
            "server. Leave --servers out."
        )


def _call_listeners(optimizer: Optimizer, has_ended: bool) -> None:
    for each in _listeners:
        if (listener := each()) is not None:
            listener(optimizer, has_ended)


def count_batch() -> None:
    """Count a batch that was drawn from a loader, after the first optimizer step of its epoch."""
    global _num_batches
    _num_batches += 1


def batches_drawn() -> int:
    """Number of batches that this process has drawn from evenstep's loaders, each after the first step of its epoch."""
    return _num_batches


def mark_compilations() -> None:
    """Write to the page when torch.compile runs, once dynamo is imported. A second call does nothing."""
    global _is_told_of_compiling
    callbacks = sys.modules.get("torch._dynamo.callback")
    if callbacks is None or _is_told_of_compiling:
        return
    _is_told_of_compiling = True
    before: list[Phase] = []

    def begin(_: object) -> None:
        before.append(heartbeat.phase_now() or Phase.BETWEEN_STEPS)
        mark(Phase.COMPILING)

    def end(_: object) -> None:
        if before:
            mark(before.pop())

    handler = getattr(callbacks, "callback_handler", None)
    if handler is not None:
        handler.register_start_callback(begin)
        handler.register_end_callback(end)


class StragglerWatch:
    """Names a rank of this node that slows the others, once, on the node's lowest rank. It only prints.

    A rank is slow if its own part of a step takes 1.5 times the others' median in two successive windows; a single
    window may contain an evaluation or a save.

    A window lasts `WINDOW_S` at least.
    """

    def __init__(self) -> None:
        self._before: tuple[float, dict[int, Heartbeat]] | None = None
        self._suspects: frozenset[int] = frozenset()
        self._told: set[int] = set()

    def poll(self, now: float) -> None:
        """Read the pages if a window has passed, and warn of slow ranks."""
        if self._before is not None and now - self._before[0] < WINDOW_S:
            return
        pages = peer_heartbeats.read_all()
        if len(pages) < 2 or pages[min(pages)].pid != os.getpid():
            return
        for line in self.judge(now, pages):
            say(f"evenstep: {line}")

    def judge(self, now: float, pages: dict[int, Heartbeat]) -> list[str]:
        """Lines about stragglers, from the pages at one moment. Pure, except for the memory of earlier pages."""
        before, self._before = self._before, (now, pages)
        if before is None:
            return []
        found = find_stragglers(before[1], pages)
        lines = []
        for rank in sorted(found.keys() & self._suspects - self._told):
            self._told.add(rank)
            lines.append(
                f"rank {rank} (pid {pages[rank].pid}) is slow: its part of a step takes {found[rank]:.1f} times as "
                f"long as the others', which wait for it. Check for another load on its cores or GPU, for a slow disk, "
                f"and for more work in its batches. This warning comes once."
            )
        self._suspects = frozenset(found)
        return lines


def find_stragglers(
    before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat], *, factor: float = 1.5, least_steps: int = 20
) -> dict[int, float]:
    """Ranks that slow the others, and by how much. Pure.

    All ranks take the same steps in the same time, but wait for the others for different parts of that time. The rest
    is a rank's own work, from the end of one exchange until it is ready for the next.

    Args:
        before: Pages of one host, by rank.
        after: The same pages later.
        factor: A rank that takes this many times the others' median is a straggler.
        least_steps: With fewer steps, no rank is judged.

    Returns:
        For each such rank, its own work as a multiple of the others' median.
    """
    busy = {}
    for rank, now in after.items():
        then = before.get(rank)
        if then is None or then.pid != now.pid or now.step - then.step < least_steps:
            return {}
        spent_ns = (now.stepped_ns - then.stepped_ns) - (now.waited_ns - then.waited_ns)
        busy[rank] = max(1.0, spent_ns / (now.step - then.step))
    found = {}
    for rank, mine in busy.items():
        others = [each for other, each in busy.items() if other != rank]
        if others and mine >= factor * statistics.median(others):
            found[rank] = mine / statistics.median(others)
    return found


_watch = StragglerWatch()
