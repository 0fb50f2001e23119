"""Parts of torchelastic that have no public names. All of them are in torch 2.11 to 2.13.

`ElasticAgent` names the methods of torchelastic's agent that ours extends. The functions give torchelastic another
agent, another way to start processes, or another store, each only inside a `with` or a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api

from evenstep.ground.compat.private_names import PrivateName

StartProcess = Callable[[Sequence[str], Mapping[str, str], Sequence[int]], Any]
"""(command, variables, [stdin, stdout, stderr]) to a process as `subprocess.Popen`; None: torchelastic starts it."""


class ElasticAgent(LocalElasticAgent):
    """torchelastic's agent, with public names for the methods that a subclass extends."""

    def meet(self, worker_group: Any) -> None:
        """Meet the other nodes and assign ranks. Collective over nodes."""
        super()._rendezvous(worker_group)

    def start_processes(self, worker_group: Any) -> dict[int, Any]:
        """Start the processes; returns an identifier of each, by local rank."""
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def look(self, worker_group: Any) -> RunResult:
        """Look at the processes once."""
        found: RunResult = super()._monitor_workers(worker_group)
        return found

    def restart(self, worker_group: Any) -> None:
        """Stop the processes, meet the nodes again, and start processes."""
        super()._restart_workers(worker_group)

    @property
    def processes(self) -> Any:
        """torchelastic's context of the running processes, or what stands in its place; None before the first."""
        return self._pcontext

    @processes.setter
    def processes(self, context: Any) -> None:
        """Put something in its place."""
        self._pcontext = context

    @property
    def restarts_left(self) -> int:
        """How many failed attempts may still be followed by another."""
        return int(self._remaining_restarts)

    @restarts_left.setter
    def restarts_left(self, count: int) -> None:
        """Change how many."""
        self._remaining_restarts = count

    # Called by torchelastic.

    def _rendezvous(self, worker_group: Any) -> None:
        self.meet(worker_group)

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        return self.start_processes(worker_group)

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        return self.look(worker_group)

    def _restart_workers(self, worker_group: Any) -> None:
        self.restart(worker_group)


def launch(agent: Callable[..., LocalElasticAgent], config: Any, command: Any, arguments: Sequence[str]) -> Any:
    """torch's `launch_agent` with another agent.

    `launch_agent` takes no class for its agent, so the name that it looks up is replaced during the call.
    """
    with mock.patch.object(api, "LocalElasticAgent", agent):
        return api.launch_agent(config, command, list(arguments))


@contextlib.contextmanager
def processes_started_by(start: StartProcess | None) -> Iterator[None]:
    """Have torchelastic start processes by `start` inside; with None, or where torch has no handlers, by itself."""
    if start is None or not hasattr(multiprocessing, "get_subprocess_handler"):
        yield
        return
    handler = functools.partial(_Handler, start=start)
    with mock.patch.object(multiprocessing, "get_subprocess_handler", handler):
        yield


class _Handler(SubprocessHandler):
    """torchelastic's handler of one process, which starts it in another way."""

    def __init__(self, *args: Any, start: StartProcess, **kwargs: Any) -> None:
        self._start = start
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        out = self._stdout.fileno() if self._stdout else 1
        err = self._stderr.fileno() if self._stderr else 2
        process = self._start(args, env, [0, out, err])
        return super()._popen(args, env) if process is None else process


@contextlib.contextmanager
def fresh_store(handler: Any, open_store: Callable[..., Any]) -> Iterator[None]:
    """Have torch's elastic rendezvous, if `handler` is that, open another store for a rendezvous inside.

    It would reuse the store of the first rendezvous: with the addresses of ranks that are gone, or on a node that no
    longer has rank 0; and a node that joins later waits for it in vain. Its own store listens on all interfaces, too.
    """
    if not (hasattr(handler, "_bootstrap_store_info") and hasattr(handler, "_create_tcp_store_server")):
        yield
        return
    before = handler._shared_tcp_store_server  # to be read until all nodes are in the next rendezvous
    handler._bootstrap_store_info = None
    handler._shared_tcp_store_server = None
    handler._create_tcp_store_server = open_store
    try:
        yield
    finally:
        del handler._create_tcp_store_server  # torch's own is the class's
        del before


# What isn't looked for when evenstep is imported.
_ELASTIC = "torch.distributed.elastic"
_AGENT = f"{_ELASTIC}.agent.server.local_elastic_agent:LocalElasticAgent"
_RENDEZVOUS = f"{_ELASTIC}.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler"
_NO_RUN = "evenstep run can't start ranks"
_NO_RESTART = "evenstep run can't restart ranks"
NAMES = (
    *(
        PrivateName(f"{_AGENT}.{name}", "a method of torchelastic's agent that ours extends", _NO_RUN)
        for name in (
            "_rendezvous",
            "_start_workers",
            "_monitor_workers",
            "_restart_workers",
            "__init__~_pcontext",
        )
    ),
    PrivateName(
        f"{_ELASTIC}.agent.server.api:SimpleElasticAgent.__init__~_remaining_restarts", "restarts left", _NO_RESTART
    ),
    PrivateName("torch.distributed.launcher.api:launch_agent~LocalElasticAgent", "the agent that is started", _NO_RUN),
    PrivateName(
        f"{_ELASTIC}.multiprocessing.api:get_subprocess_handler",
        "starts a rank's process",
        "ranks are new pythons, and start in seconds",
    ),
    PrivateName(f"{_ELASTIC}.multiprocessing.subprocess_handler:SubprocessHandler._popen", "starts a process", _NO_RUN),
    *(
        PrivateName(where, "the store of a rendezvous", "a restart on several nodes meets in the old store")
        for where in (
            f"{_RENDEZVOUS}.__init__~_bootstrap_store_info",
            f"{_RENDEZVOUS}.__init__~_shared_tcp_store_server",
            f"{_RENDEZVOUS}._create_tcp_store_server",
        )
    ),
)
