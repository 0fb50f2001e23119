"""How the launchers of several hosts meet that were all told where: `--node-rank`, `--master-addr`, `--master-port`.

Stands where torch has its "static" rendezvous, and differs in three things: the store listens on the named address and
on no other; whoever comes says how many hosts it expects, and of which run, so that a difference ends all of them at
once instead of leaving them waiting for each other; and who waits says for whom.
"""

from __future__ import annotations

import errno
import sys
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from evenstep import network
from evenstep.errors import ConfigurationError
from evenstep.launcher.membership import open_store

NAME = "evenstep-hosts"
_TIMEOUT_S = 600.0
_TELL_AFTER_S = 10.0
_LOOK_S = 0.1
_LINGER_S = 1.0  # before the store goes with its host: the others have yet to read why


class HostsRendezvous(RendezvousHandler):
    """A meeting of a known number of hosts. Arguments are what the command line says.

    Args:
        address: Of the host with node rank 0, which keeps the store.
        port: Where it listens.
        node_rank: This host.
        num_nodes: All hosts.
        run_id: Name of the run.
        timeout_s: How long to wait for the others.
    """

    use_agent_store = True

    def __init__(
        self, address: str, port: int, *, node_rank: int, num_nodes: int, run_id: str, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._address, self._port = address, port
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._store: Store | None = None
        self._ranks_store: TCPStore | None = None
        self._num_rounds = 0

    def get_backend(self) -> str:
        """See base class."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all hosts are here.

        Raises:
            ConfigurationError: They were told different things, or don't come.
        """
        store = self._store = self._store or self._open()
        self._num_rounds += 1
        here = PrefixStore(f"round-{self._num_rounds}", store)
        self._await_all(here)
        info = RendezvousStoreInfo(self._address, self._find_port(here))
        return RendezvousInfo(here, self._node_rank, self._num_nodes, info)

    def _find_port(self, here: Store) -> int:
        """Where the ranks of this attempt meet: the named port at first, and then a new store at a free one.

        torch's own `init_process_group` has one name for all attempts: it would find the addresses of the ranks before.
        """
        if self._num_rounds == 1:
            return self._port
        if self._node_rank == 0:
            self._ranks_store = open_store(self._address, 0)  # all have come here, so nobody reads the one before
            here.set("port", str(self._ranks_store.port))
        return int(here.get("port"))

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """See base class."""

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        return True

    def _open(self) -> Store:
        where = f"{self._address}:{self._port}"
        if self._node_rank == 0:
            try:
                return open_store(self._address, self._port, timeout=timedelta(seconds=self._timeout_s))
            except OSError as error:
                remedy = "--master-addr names the host with --node-rank 0, by an address that it has."
                if error.errno == errno.EADDRINUSE:
                    remedy = (
                        f"It is in use by {network.owner_of(self._port) or 'somebody'}: choose another --master-port."
                    )
                raise ConfigurationError(f"can't listen at {where}: {error.strerror}. {remedy}") from None
        try:
            return TCPStore(
                self._address,
                self._port,
                is_master=False,
                timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise ConfigurationError(
                f"node 0 did not answer at {where} within {self._timeout_s:g} s "
                f"({(str(error).splitlines() or [''])[0]}). Check that it runs the same command, and that the address "
                f"and port can be reached."
            ) from None

    def _await_all(self, store: Store) -> None:
        expected = f"--nnodes {self._num_nodes} --rdzv-id {self._run_id}"
        if store.add(f"taken-{self._node_rank}", 1) > 1:
            raise ConfigurationError(
                f"two hosts have --node-rank {self._node_rank}. Give every host its own, 0 to {self._num_nodes - 1}."
            )
        store.set(f"host-{self._node_rank}", expected)
        started = time.monotonic()
        has_told = False
        while True:
            said = {n: store.get(f"host-{n}").decode() for n in range(self._num_nodes) if store.check([f"host-{n}"])}
            for node, text in said.items():
                if text != expected:
                    time.sleep(_LINGER_S)
                    raise ConfigurationError(
                        f"the hosts were given different commands: {expected} on node {self._node_rank}, {text} on "
                        f"node {node}. Start all of them with the same."
                    )
            missing = [node for node in range(self._num_nodes) if node not in said]
            if not missing:
                return
            waited_s = time.monotonic() - started
            names = f"{'node' if len(missing) == 1 else 'nodes'} {', '.join(map(str, missing))} of {self._num_nodes}"
            if waited_s > self._timeout_s:
                raise ConfigurationError(
                    f"{names} did not come to {self._address}:{self._port} within {waited_s:.0f} s."
                )
            if waited_s > _TELL_AFTER_S and not has_told:
                has_told = True
                print(f"evenstep: waiting for {names}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(_LOOK_S)


def _create(parameters: RendezvousParameters) -> Any:
    address, _, port = parameters.endpoint.rpartition(":")
    return HostsRendezvous(
        address.strip("[]"),
        int(port),
        node_rank=int(parameters.config["rank"]),
        num_nodes=parameters.max_nodes,
        run_id=parameters.run_id,
        timeout_s=float(parameters.config.get("timeout", _TIMEOUT_S)),
    )


def register() -> None:
    """Make the rendezvous known to torchelastic under `NAME`. Twice is once."""
    rendezvous_handler_registry.register(NAME, _create)
