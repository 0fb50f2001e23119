"""The agent of one node: the one place that decides whether a run ends or starts its ranks again.

A signal to the launcher makes `run_attempts` raise an exception; `launcher/run.py` then returns the status.
"""

from __future__ import annotations

import platform
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenstep.console import say
from evenstep.ground import environment
from evenstep.ground.compat.torch_elastic import ElasticAgent
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.launcher.elastic.attempt import Attempt, Ranks
from evenstep.launcher.elastic.nodes import OtherNodes, Standing, compare_standings
from evenstep.launcher.elastic.rendezvous import FixedNodesRendezvous, bound_answers, open_store
from evenstep.launcher.failure.report import Failure, StopPolicy, describe_failure, describe_ranks
from evenstep.launcher.failure.verdict import End
from evenstep.launcher.options.logs import name_of_run, tail


class RunFailed(Exception):
    """An attempt has failed, and no other follows. The message has been printed already."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


def plan_next(now: Standing, *, max_restarts: int, was_stopping: bool) -> tuple[bool, str]:
    """Whether another attempt follows a failed attempt, and a line to print, or "". Pure.

    Args:
        now: The run's standing after the failed attempt.
        max_restarts: The command's `--max-restarts`.
        was_stopping: Whether the run had been asked to stop.
    """
    num_left = max_restarts - now.num_restarts
    if was_stopping:
        return False, "the run had been asked to stop, so there is no other attempt"
    if num_left <= 0:
        return False, ""
    if now.is_in_vain:
        return False, (
            f"{now.num_in_vain} restarts have come to no new checkpoint, so there is no other, though --max-restarts "
            f"{max_restarts} allows {num_left} more"
        )
    return True, f"restarting all ranks: attempt {now.num_restarts + 2} of {max_restarts + 1}"


class RankAgent(ElasticAgent):
    """torchelastic's agent of this node, with evenstep's attempts.

    A joining node is not a failure: the ranks start again, and this doesn't count as a restart. The nodes notice the
    new node at different times, and ranks of one node fail when another node stops its ranks. So the first node that
    notices the new one announces it to the others. A node that joins later has counted no restarts, so the nodes
    compare their counts at every rendezvous.

    Args:
        policy: How ranks are watched and stopped.
        timeouts: How long ranks may keep others waiting.
        kwargs: torch's arguments.
    """

    def __init__(self, *, policy: StopPolicy, timeouts: PhaseTimeouts, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._spec, self._logs = kwargs["spec"], kwargs["logs_specs"]
        bound_answers(self._spec.rdzv_handler)
        self._policy, self._timeouts = policy, timeouts
        self._standing = Standing()
        self._attempt: Attempt | None = None
        self._failure: Failure | None = None  # the last failed attempt's failure

    @property
    def has_saved(self) -> bool:
        """Whether the ranks have saved and ended after a request to stop."""
        return self._attempt is not None and self._attempt.has_saved

    @property
    def left_logs(self) -> bool:
        """Whether an attempt has failed and left a log."""
        logs = Path(self._logs.root_log_dir).glob("rank-*.log")
        return self._failure is not None and any(path.stat().st_size > 0 for path in logs)

    def run_attempts(self) -> None:
        """Start the ranks, repeatedly if necessary, until they have ended without an error, or have saved.

        Raises:
            RunFailed: An attempt has failed, and no other follows.
        """
        while True:
            self._attempt = self._begin()
            end = self._attempt.watch()
            if end in (End.WELL, End.SAVED):
                return
            if self._attempt.failure is not None:
                self._decide(self._attempt.failure, self._attempt.saved)
            else:
                self._standing = self._standing.after(self._attempt.saved)

    def _decide(self, failure: Failure, saved: Standing) -> None:
        """Print which rank failed, and continue with another attempt, or raise `RunFailed`."""
        self._failure, now, most = failure, self._standing.after_failure(saved), self._spec.max_restarts
        goes_on, remark = plan_next(now, max_restarts=most, was_stopping=failure.was_stopping)
        destination = self._logs.destinations.get(failure.root_cause.rank)
        log = "" if destination is None else destination.stderr or destination.stdout
        directory = Path(self._logs.root_log_dir)
        run = f"run {name_of_run(directory)}, attempt {failure.attempt + 1} of {most + 1}, host {platform.node()}"
        text = describe_failure(
            failure,
            run=run,
            num_nodes=self.get_worker_group().group_world_size or 1,
            log=log,
            log_tail=tail(log) if log else "",
            other_logs=directory if not goes_on and self.left_logs else None,
            saved_step=now.saved_step,
        )
        say(text + (f"\nevenstep: {remark}" if remark else ""))
        if not goes_on:
            raise RunFailed(failure)
        self._standing = replace(now, num_restarts=now.num_restarts + 1)

    def _begin(self) -> Attempt:
        """Meet the other nodes, and start the ranks. Collective over nodes."""
        group, most = self.meet(open_store), self._spec.max_restarts
        session = ""
        if group.group_world_size > 1:
            self._standing = compare_standings(
                group.store, self._standing, node_rank=group.group_rank, num_nodes=group.group_world_size
            )
            # The first node names the session: nodes count restarts separately, so a count couldn't. The store belongs
            # to this rendezvous only.
            session = group.store.compare_set("evenstep/session", "", uuid.uuid4().hex).decode()
        pages, ranks = NodePages(len(group.workers)), [worker.global_rank for worker in group.workers]
        with environment.exported(environment.changed_settings(rendezvous=session, **pages.settings)):
            started = self.start_processes(num_restarts=self._standing.num_restarts)
        others = None
        if session:
            others = OtherNodes(
                group.master_addr,
                group.master_port,
                session=session,
                node_rank=group.group_rank,
                num_nodes=group.group_world_size,
                lost_after_s=self._policy.node_timeout_s,
                describe=lambda: describe_ranks(pages.read(ranks), now_ns=time.monotonic_ns()),
            )
        attempt = Attempt(
            Ranks(started, ranks=ranks, pages=pages),
            number=self._standing.num_restarts,
            policy=self._policy,
            timeouts=self._timeouts,
            num_ranks=group.workers[0].world_size,
            others=others,
            # `most` is from the command, so equal on all nodes: else others may wait for a node that has no restarts
            # left.
            may_restart=most > 0,
            needs_all_nodes=isinstance(self._spec.rdzv_handler, FixedNodesRendezvous),
            num_nodes_waiting=self._spec.rdzv_handler.num_nodes_waiting,
        )
        self.closes(attempt)
        return attempt
