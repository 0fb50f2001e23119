"""torchelastic's agent of one node: rendezvous, starting the ranks, restarting them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from evenstep.ground import environment
from evenstep.ground.compat.torch_elastic import ElasticAgent, fresh_store
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.launcher.elastic.nodes import OtherNodes, RestartLimit, compare_standings
from evenstep.launcher.elastic.rendezvous import bound_answers, open_store
from evenstep.launcher.elastic.supervisor import WatchedRanks
from evenstep.launcher.failure.report import Failure, LossPolicy, StopPolicy, describe_ranks


class RankAgent(ElasticAgent):
    """torchelastic's agent of this node, which watches its ranks through `WatchedRanks`.

    `on_failure` receives a failed attempt and the number of restarts left, and returns whether to restart. `limit`
    counts restarts in vain; nodes that join later adopt its count.

    A node that joins is no failure: torchelastic restarts the ranks without counting that. But its nodes find out one
    by one, while ranks of one end because those of another were stopped; and a node that joins later counts from 0.
    So the first node to see a new one announces it to the others, and at every rendezvous the nodes compare counts.
    """

    def __init__(
        self,
        *args: Any,
        policy: StopPolicy,
        timeouts: PhaseTimeouts,
        on_failure: Callable[[Failure, int], bool],
        on_preempted: Callable[[], None],
        limit: RestartLimit,
        name_after_s: float,
        losses: LossPolicy,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        bound_answers(kwargs["spec"].rdzv_handler)
        self._policy = policy
        self._timeouts = timeouts
        self._on_failure = on_failure
        self._on_preempted = on_preempted
        self._limit = limit
        self._name_after_s = name_after_s
        self._losses = losses

    def meet(self, worker_group: Any) -> None:
        """See base class."""
        with fresh_store(worker_group.spec.rdzv_handler, open_store):
            super().meet(worker_group)
        if worker_group.group_world_size > 1:
            most = worker_group.spec.max_restarts
            together = compare_standings(
                worker_group.store,
                self._limit.standing(num_restarts=most - self.restarts_left),
                node_rank=worker_group.group_rank,
                num_nodes=worker_group.group_world_size,
            )
            self._limit.adopt(together)
            self.restarts_left = max(0, most - together.num_restarts)

    def look(self, worker_group: Any) -> RunResult:
        """See base class."""
        found = super().look(worker_group)
        if self._ranks is not None and self._ranks.should_admit_node:
            worker_group.state = WorkerState.HEALTHY
            self.restart(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        return found

    def restart(self, worker_group: Any) -> None:
        """See base class."""
        if worker_group.state == WorkerState.HEALTHY and self._ranks is not None:
            self._limit.note_saved(self._ranks.stop_for_new_node())
        super().restart(worker_group)

    @property
    def _ranks(self) -> WatchedRanks | None:
        return self.processes if isinstance(self.processes, WatchedRanks) else None

    def start_processes(self, worker_group: Any) -> dict[int, Any]:
        """See base class."""
        attempt = worker_group.spec.max_restarts - self.restarts_left
        session = ""
        if worker_group.group_world_size > 1:
            # Every node counts restarts by itself; the store is one of this rendezvous alone.
            session = worker_group.store.compare_set("evenstep/session", "", uuid.uuid4().hex).decode()
        pages = NodePages(len(worker_group.workers))
        with environment.exported(environment.changed_settings(rendezvous=session, **pages.settings)):
            pids = super().start_processes(worker_group)
        ranks = [worker.global_rank for worker in worker_group.workers]
        others = None
        if session:
            others = OtherNodes(
                worker_group.master_addr,
                worker_group.master_port,
                session=session,
                node_rank=worker_group.group_rank,
                num_nodes=worker_group.group_world_size,
                lost_after_s=self._policy.node_timeout_s,
                describe=lambda: describe_ranks(pages.read(ranks), now_ns=time.monotonic_ns()),
            )
        self.processes = WatchedRanks(
            self.processes,
            ranks=ranks,
            attempt=attempt,
            others=others,
            # As the command says, so equal on all nodes: others may wait for a node that has no restart left.
            may_restart=worker_group.spec.max_restarts > 0,
            pages=pages,
            policy=self._policy,
            timeouts=self._timeouts,
            on_failure=self._attempt_failed,
            on_preempted=self._on_preempted,
            num_ranks=worker_group.workers[0].world_size,
            name_after_s=self._name_after_s,
            losses=self._losses,
        )
        return pids

    def _attempt_failed(self, failure: Failure) -> None:
        if not self._on_failure(failure, self.restarts_left):
            self.restarts_left = 0
