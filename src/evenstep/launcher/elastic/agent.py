"""torchelastic's agent for one host: it meets the others, starts the ranks, and starts them again."""

from __future__ import annotations

import math
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from evenstep import environment
from evenstep.health.budgets import Budgets
from evenstep.launcher.account import Failure, describe_ranks
from evenstep.launcher.agent import WatchedRanks, read_pages
from evenstep.launcher.membership import compare_standings, forget_attempt, fresh_meeting_place
from evenstep.launcher.other_hosts import OtherHosts
from evenstep.launcher.verdict import RestartLimit, StopPolicy

_SAME_REQUEST_S = 1.0  # a signal that is repeated within this time was sent twice


class RankAgent(LocalElasticAgent):
    """torchelastic's agent for this host, watching its ranks through `WatchedRanks`.

    `on_failure` is told of a failed attempt and of the restarts that are left, and says whether to make use of them.
    `limit` counts restarts in vain; what it knows is told to hosts that join later.

    Hosts that join are no failure: torchelastic restarts the ranks without counting that. It leaves the hosts to find
    out one by one, though, while ranks of one end because those of another were stopped; and a host that comes later
    counts from nought. So who sees it first tells the others, and at every meeting the hosts compare what they count.
    """

    def __init__(
        self,
        *args: Any,
        run_directory: Path,
        policy: StopPolicy,
        budgets: Budgets,
        on_failure: Callable[[Failure, int], bool],
        on_preempted: Callable[[], None],
        limit: RestartLimit,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._run_directory = run_directory
        self._policy = policy
        self._budgets = budgets
        self._on_failure = on_failure
        self._on_preempted = on_preempted
        self._limit = limit
        self._last_attempt: int | None = None
        self._has_made_room = False

    def _rendezvous(self, worker_group: Any) -> None:
        with fresh_meeting_place(worker_group.spec.rdzv_handler):
            super()._rendezvous(worker_group)
        if worker_group.group_world_size > 1:
            most = worker_group.spec.max_restarts
            together = compare_standings(
                worker_group.store,
                self._limit.standing(num_restarts=most - self._remaining_restarts),
                node_rank=worker_group.group_rank,
                num_nodes=worker_group.group_world_size,
            )
            self._limit.adopt(together)
            self._remaining_restarts = max(0, most - together.num_restarts)

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        found: RunResult = super()._monitor_workers(worker_group)
        if self._ranks is not None and self._ranks.should_make_room:
            worker_group.state = WorkerState.HEALTHY
            self._restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        return found

    def _restart_workers(self, worker_group: Any) -> None:
        if worker_group.state == WorkerState.HEALTHY and self._ranks is not None:
            self._limit.note_saved(self._ranks.make_room())
            self._has_made_room = True
        super()._restart_workers(worker_group)
        self._has_made_room = False

    def _stop_workers(self, worker_group: Any) -> None:
        if not self._has_made_room:  # who was asked to stop has saved, and would be taken for the end of the run
            super()._stop_workers(worker_group)

    @property
    def _ranks(self) -> WatchedRanks | None:
        return self._pcontext if isinstance(self._pcontext, WatchedRanks) else None

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        if attempt == self._last_attempt:
            forget_attempt(self._run_directory, attempt)
        self._last_attempt = attempt
        talk = ""
        if worker_group.group_world_size > 1:
            # Hosts count restarts of their own; the store is one of this meeting alone.
            talk = worker_group.store.compare_set("evenstep/talk", "", uuid.uuid4().hex).decode()
        with environment.exported({"EVENSTEP_MEETING": talk} if talk else {}):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        _merge_repeated_requests()
        ranks = [worker.global_rank for worker in worker_group.workers]
        others = None
        if talk:
            others = OtherHosts(
                worker_group.master_addr,
                worker_group.master_port,
                talk=talk,
                node_rank=worker_group.group_rank,
                num_nodes=worker_group.group_world_size,
                describe=lambda: describe_ranks(
                    read_pages(self._run_directory, ranks, attempt), now_ns=time.monotonic_ns()
                ),
            )
        self._pcontext = WatchedRanks(  # type: ignore[assignment]
            self._pcontext,  # type: ignore[arg-type]
            ranks=ranks,
            attempt=attempt,
            others=others,
            # As the command says, on all hosts alike: one that has no restart left may be waited for by another.
            may_restart=worker_group.spec.max_restarts > 0,
            run_directory=self._run_directory,
            policy=self._policy,
            budgets=self._budgets,
            on_failure=self._attempt_failed,
            on_preempted=self._on_preempted,
        )
        return pids

    def _attempt_failed(self, failure: Failure) -> None:
        if not self._on_failure(failure, self._remaining_restarts):
            self._remaining_restarts = 0


def _merge_repeated_requests() -> None:
    """Take a request to stop that comes twice at once for one; a second would end the save that the first asked for.

    GNU timeout signals the process that it has started, and then its group, to which that process belongs. A second
    Ctrl-C is a person's, and counts whenever it comes.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    last: dict[int, float] = {}
    for which in signal.valid_signals() - {signal.SIGINT}:
        stops = signal.getsignal(which)
        if getattr(stops, "__name__", "") != "_terminate_process_handler":  # torchelastic's, of the signals to handle
            continue

        def handle(number: int, frame: FrameType | None, stops: Any = stops) -> None:
            now = time.monotonic()
            if now - last.get(number, -math.inf) > _SAME_REQUEST_S:
                last[number] = now
                stops(number, frame)

        signal.signal(which, handle)
