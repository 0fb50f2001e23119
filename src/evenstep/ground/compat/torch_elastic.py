"""Parts of torchelastic that have no public names. All of them are in torch 2.11 to 2.13.

`ElasticAgent` is torchelastic's agent with another loop. The functions replace torchelastic's agent, its way to start
processes, or its store. Each does so only inside a `with` block or a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import EventSource
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api

from evenstep.ground.compat.private_names import PrivateName

StartProcess = Callable[[Sequence[str], Mapping[str, str], Sequence[int]], Any]
"""(command, variables, [stdin, stdout, stderr]) to a process as `subprocess.Popen`; None: torchelastic starts it."""


class ElasticAgent(LocalElasticAgent):
    """torchelastic's agent without its loop, which `run_attempts` of a subclass replaces.

    torchelastic assigns ranks, starts processes with their variables, and at the end closes the object last passed to
    `closes`.
    """

    def run_attempts(self) -> None:
        """Meet the other nodes, start processes and watch them; returns when all have succeeded."""
        raise NotImplementedError

    def meet(self, open_store: Callable[..., Any]) -> Any:
        """Meet the other nodes and assign ranks; returns torchelastic's group of them. Collective over nodes.

        Args:
            open_store: Opens a store that only this rendezvous uses.
        """
        group = self.get_worker_group()
        if self._pcontext is not None:
            self._shutdown()  # torchelastic's watchdog of the last attempt
        with _fresh_store(group.spec.rdzv_handler, open_store):
            self._rendezvous(group)
        return group

    def start_processes(self, *, num_restarts: int) -> Any:
        """Start the processes of these ranks; returns torchelastic's context of them."""
        group = self.get_worker_group()
        spec = group.spec
        self._remaining_restarts = spec.max_restarts - num_restarts
        for local_rank, pid in self._start_workers(group).items():
            worker = group.workers[local_rank]
            worker.id = pid
            record(self._construct_event("START", EventSource.WORKER, worker), spec.event_log_handler)
        return self._pcontext

    def closes(self, context: Any) -> None:
        """Make torchelastic call `context.close(signal, timeout)` when a signal or an error ends the run."""
        self._pcontext = context

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Called by torchelastic."""
        self.run_attempts()
        ranks = [worker.global_rank for worker in self.get_worker_group().workers]
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))


def launch(agent: Callable[..., LocalElasticAgent], config: Any, command: Any, arguments: Sequence[str]) -> Any:
    """Call torch's `launch_agent` with another agent.

    `launch_agent` has no argument for the agent's class, so the name that it looks up is replaced during the call.
    """
    with mock.patch.object(api, "LocalElasticAgent", agent):
        return api.launch_agent(config, command, list(arguments))


@contextlib.contextmanager
def processes_started_by(start: StartProcess | None) -> Iterator[None]:
    """Context in which torchelastic starts processes by `start`; None, or a torch without handlers: as usual."""
    if start is None or not hasattr(multiprocessing, "get_subprocess_handler"):
        yield
        return
    handler = functools.partial(_Handler, start=start)
    with mock.patch.object(multiprocessing, "get_subprocess_handler", handler):
        yield


class _Handler(SubprocessHandler):
    """torchelastic's handler of one process, with another way to start the process."""

    def __init__(self, *args: Any, start: StartProcess, **kwargs: Any) -> None:
        self._start = start
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        out = self._stdout.fileno() if self._stdout else 1
        err = self._stderr.fileno() if self._stderr else 2
        process = self._start(args, env, [0, out, err])
        return super()._popen(args, env) if process is None else process


@contextlib.contextmanager
def _fresh_store(handler: Any, open_store: Callable[..., Any]) -> Iterator[None]:
    """Context in which torch's elastic rendezvous, if `handler` is one, opens a new store.

    Otherwise it would reuse the store of the first rendezvous. That store has the addresses of dead ranks, or is on a
    node that no longer has rank 0, where a node that joins later would wait for it in vain. torch's own store also
    listens on all interfaces.
    """
    if not (hasattr(handler, "_bootstrap_store_info") and hasattr(handler, "_create_tcp_store_server")):
        yield
        return
    before = handler._shared_tcp_store_server  # other nodes may read it until all are in the next rendezvous
    handler._bootstrap_store_info = None
    handler._shared_tcp_store_server = None
    handler._create_tcp_store_server = open_store
    try:
        yield
    finally:
        del handler._create_tcp_store_server  # the class has torch's own
        del before


# Names that aren't checked at evenstep's import.
_ELASTIC = "torch.distributed.elastic"
_AGENT = f"{_ELASTIC}.agent.server.local_elastic_agent:LocalElasticAgent"
_RENDEZVOUS = f"{_ELASTIC}.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler"
_NO_RUN = "evenstep run can't start ranks"
_NO_RESTART = "evenstep run can't restart ranks"
NAMES = (
    *(
        PrivateName(f"{_AGENT}.{name}", "a method of torchelastic's agent that ours calls, or replaces", _NO_RUN)
        for name in (
            "_invoke_run",
            "_rendezvous",
            "_start_workers",
            "_construct_event",
            "_shutdown",
            "__init__~_pcontext",
        )
    ),
    PrivateName(
        f"{_ELASTIC}.agent.server.api:SimpleElasticAgent.__init__~_remaining_restarts",
        "the number of the attempt, as ranks get it",
        _NO_RESTART,
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
