"""How the launchers of a run's nodes find each other: rendezvous handlers for torchelastic, and their store.

`OneNodeRendezvous` is for one node, `FixedNodesRendezvous` for a fixed number of nodes. torch's own "c10d" rendezvous
serves a number of nodes that may change (`--nnodes 1:4`).
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one from python 3.11 on
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig

from evenstep.console import say
from evenstep.errors import ConfigurationError
from evenstep.ground.coordination.rendezvous_store import call_within
from evenstep.ground.host import network
from evenstep.launcher.options.flags import Nodes

_BACKEND = "evenstep"  # the name of both handlers in torchelastic
_PORT = 29500  # torchrun's default
_ANSWER_S = 2.0
_REPORT_AFTER_S = 10.0
_POLL_S = 0.1
_LINGER_S = 1.0  # time before the store ends with its node: the others still have to read the reason


def open_store(address: str, port: int, **settings: Any) -> TCPStore:
    """Open a store on this node, at `network.bind_address`.

    Args:
        address: This node's address for all other nodes.
        port: The port on which it listens; 0: the system chooses.
        settings: torch's settings.

    Raises:
        OSError: The address isn't this node's, or the port is in use.
    """
    listener = network.listen(network.bind_address(address), port)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), **settings
    )


class OneNodeRendezvous(StaticTCPRendezvous):
    """The rendezvous of a run on one node: it listens on no port and waits for no node.

    Args:
        run_id: Name of the run.
        port: `MASTER_PORT` of scripts; 0: a free port, a different one for every attempt.

    torchelastic needs a rendezvous even for a single node. Its own rendezvous opens a store that listens on every
    interface. This rendezvous holds a dictionary, and reserves a port on which a script may open its own store.
    `evenstep.init` and torch's `init_process_group` need no port: they rendezvous through a file that the launcher has
    made.
    """

    def __init__(self, run_id: str, port: int = 0) -> None:
        super().__init__(network.LOOPBACK, port, 0, 1, run_id, 0)
        self._reservation: network.Reservation | None = None

    use_agent_store = False  # rank 0 hosts torch's store, if the script wants one

    def get_backend(self) -> str:
        """See base class."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self.shutdown()
        port = self.master_port
        if not port:
            self._reservation = network.Reservation()
            port = self._reservation.port
        return RendezvousInfo(HashStore(), self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, port))

    def shutdown(self) -> bool:
        """See base class."""
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None
        return True


class FixedNodesRendezvous(StaticTCPRendezvous):
    """The rendezvous of a fixed number of nodes, given `--node-rank`, `--master-addr` and `--master-port`.

    It replaces torch's "static" rendezvous, with three differences: the store listens only on the given address; every
    node publishes the number of nodes and the run that it expects, so that a difference ends all nodes at once; and a
    waiting node prints the nodes that it waits for.

    Args:
        address: The address of node 0, which has the store.
        port: The store's port.
        node_rank: This node.
        num_nodes: Number of nodes.
        run_id: Name of the run.
        timeout_s: Seconds to wait for the others.
        may_restart: Whether the nodes rendezvous again after a failure, and a lost node may come back as a new process.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        node_rank: int,
        num_nodes: int,
        run_id: str,
        timeout_s: float,
        may_restart: bool = False,
    ) -> None:
        super().__init__(address, port, node_rank, num_nodes, run_id, int(timeout_s))
        self._may_restart = may_restart
        self._opened: Store | None = None
        self._ranks_store: TCPStore | None = None
        self._round = 0

    def get_backend(self) -> str:
        """See base class."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes are here.

        Raises:
            ConfigurationError: The nodes were given different commands, or some don't come.
            DistError: Node 0 is gone, and the store with it.
        """
        store = self._opened = self._opened or self._open()
        here = self._take_place(store)
        self._await_all(here)
        info = RendezvousStoreInfo(self.master_addr, self._find_port(here))
        return RendezvousInfo(here, self.rank, self.world_size, info)

    def _find_port(self, here: Store) -> int:
        """The port of this attempt's store: at first the given port, later the port of a new store.

        torch's `init_process_group` uses the same keys for all attempts: it would find the addresses of an earlier
        attempt's ranks.
        """
        if self._round == 1:
            return self.master_port
        if self.rank == 0:
            self._ranks_store = open_store(self.master_addr, 0)  # no node reads the previous store any more
            here.set("port", str(self._ranks_store.port))
        return int(here.get("port"))

    def _open(self) -> Store:
        where = f"{self.master_addr}:{self.master_port}"
        if self.rank == 0:
            try:
                return open_store(self.master_addr, self.master_port, timeout=self.timeout)
            except OSError as error:
                remedy = "--master-addr must be an address of the node with --node-rank 0."
                if error.errno == errno.EADDRINUSE:
                    owner = network.owner_of(self.master_port) or "another process"
                    remedy = f"It is in use by {owner}: choose another --master-port."
                raise ConfigurationError(f"can't listen at {where}: {error.strerror}. {remedy}") from None
        # Connect in a separate thread: while torch waits, it reacts to no signal, and it waits for ever for a node that
        # never answers.
        call = call_within(
            _REPORT_AFTER_S,
            lambda: TCPStore(
                self.master_addr, self.master_port, is_master=False, timeout=self.timeout, wait_for_workers=False
            ),
        )
        if not call.done():
            say(f"evenstep: waiting for node 0 at {where}")
        try:
            return call.result(self.timeout.total_seconds())
        except (RuntimeError, FutureTimeout) as error:
            why = f" ({str(error).splitlines()[0]})" if str(error) else ""
            raise ConfigurationError(
                f"node 0 did not answer at {where} within {self.timeout.total_seconds():g} s{why}. Check that it runs "
                f"the same command, and that the address and port can be reached."
            ) from None

    def _take_place(self, store: Store) -> Store:
        """Wait until node 0 begins the next round, take this node's rank in it, and return the round's store.

        The round's number comes from the store, because a node that replaces a lost node doesn't know of earlier
        rounds.
        """
        if self.rank == 0:
            store.add("round", 1)
        started = time.monotonic()
        while time.monotonic() - started < self.timeout.total_seconds():
            newest = store.add("round", 0)
            if newest > self._round:
                self._round = newest
                here = PrefixStore(f"round-{newest}", store)
                if here.add(f"taken-{self.rank}", 1) == 1:
                    return here
                is_running = here.check([f"node-{node}" for node in range(self.world_size)])
                if not (is_running and self._may_restart):
                    raise ConfigurationError(
                        f"two nodes have --node-rank {self.rank}. Give every node its own, 0 to {self.world_size - 1}."
                    )
                say(
                    f"evenstep: the run has another node with --node-rank {self.rank}: this node waits for the next "
                    f"attempt, to replace it"
                )
            time.sleep(_POLL_S)
        raise ConfigurationError(
            f"node 0 began no other attempt within {self.timeout.total_seconds():g} s. Start all nodes anew."
        )

    def _await_all(self, store: Store) -> None:
        expected = f"--nnodes {self.world_size} --rdzv-id {self.run_id}"
        store.set(f"node-{self.rank}", expected)
        started = time.monotonic()
        is_reported = False
        while True:
            here = [node for node in range(self.world_size) if store.check([f"node-{node}"])]
            expectations = {node: store.get(f"node-{node}").decode() for node in here}
            for node, text in expectations.items():
                if text != expected:
                    time.sleep(_LINGER_S)
                    raise ConfigurationError(
                        f"the nodes were given different commands: {expected} on node {self.rank}, {text} on "
                        f"node {node}. Start all of them with the same."
                    )
            missing = [node for node in range(self.world_size) if node not in expectations]
            if not missing:
                return
            waited_s = time.monotonic() - started
            names = f"{'node' if len(missing) == 1 else 'nodes'} {', '.join(map(str, missing))} of {self.world_size}"
            if waited_s > self.timeout.total_seconds():
                raise ConfigurationError(
                    f"{names} did not come to {self.master_addr}:{self.master_port} within {waited_s:.0f} s."
                )
            if waited_s > _REPORT_AFTER_S and not is_reported:
                is_reported = True
                say(f"evenstep: waiting for {names}")
            time.sleep(_POLL_S)


def bound_answers(handler: RendezvousHandler) -> None:
    """Make a rendezvous answer torchelastic's queries quickly, while ranks run and when they have ended.

    torch's own rendezvous queries its store. On a host that is cut off, the store never answers, whatever the timeout,
    and the launcher could neither report the failure nor end.
    """
    if isinstance(handler, StaticTCPRendezvous):
        return  # evenstep's rendezvous query no store
    bounded: Any = handler
    bounded.num_nodes_waiting = _Bounded(handler.num_nodes_waiting, otherwise=0)
    bounded.shutdown = _Bounded(handler.shutdown, otherwise=False)


class _Bounded:
    """A function that is called in a thread, and whose answer is awaited only for a moment."""

    def __init__(self, function: Callable[[], Any], *, otherwise: object) -> None:
        self._function, self._otherwise = function, otherwise
        self._call: Future[Any] | None = None

    def __call__(self) -> Any:
        """The answer, or the error; `otherwise` without an answer in time, or if an earlier call still runs."""
        if self._call is None or self._call.done():
            self._call = call_within(_ANSWER_S, self._function)
            if self._call.done():
                return self._call.result()
        return self._otherwise


def choose(nodes: Nodes, config: LaunchConfig) -> None:
    """Make torchelastic's launch use the rendezvous that a command line describes.

    Args:
        nodes: The command line's nodes.
        config: torch's configuration, which is changed.

    Raises:
        ValueError: `--rdzv-conf` has a timeout that isn't a number.
    """
    settings = config.rdzv_configs
    handler: RendezvousHandler
    if nodes.most == 1 and nodes.backend in ("static", "c10d"):
        handler = OneNodeRendezvous(config.run_id, nodes.port or 0)
    elif nodes.fewest == nodes.most > 1 and nodes.backend == "static":
        handler = FixedNodesRendezvous(
            nodes.host,
            nodes.port or _PORT,
            node_rank=nodes.rank,
            num_nodes=nodes.most,
            run_id=config.run_id,
            timeout_s=float(settings["timeout"]),
            may_restart=nodes.may_restart,
        )
    else:
        if nodes.backend == "c10d" and network.is_own_address(nodes.host):
            # torch compares the endpoint with the address of this host's name, but a host may have several addresses.
            settings.setdefault("is_host", "1")
        return
    config.rdzv_backend, config.rdzv_configs = _BACKEND, {"handler": handler}
    rendezvous_handler_registry.register(_BACKEND, _given)


def _given(parameters: RendezvousParameters) -> RendezvousHandler:
    found: RendezvousHandler = parameters.config["handler"]
    return found
