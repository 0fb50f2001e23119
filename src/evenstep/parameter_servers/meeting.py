"""How the processes of a run find each other, and prove that they belong to it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from evenstep.console import say
from evenstep.errors import ConfigurationError, PeerLostError
from evenstep.ground import environment
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.environment import Placement, placement_from_nodes
from evenstep.ground.host import network
from evenstep.ground.host.temporary import private_directory
from evenstep.joining import open_group, transports_of
from evenstep.parameter_servers.preparation import CALL, WHO, Made, Roles
from evenstep.parameter_servers.server import TURN_S, Server
from evenstep.parameter_servers.wire import Badge, Client, Listener
from evenstep.replica.wrapper.model_check import validate_same_model
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.store_gather import StoreGather
from evenstep.world import World

_POLL_S = 0.05
_LONGEST_SILENCE_S = 86_400.0  # used for `--node-timeout inf`: sockets need a finite number


class Meeting:
    """Connects one process with the others: first through the run's store, then by sockets.

    Args:
        store: The store of this run.
        placement: This process's placement.
        roles: This process's roles.
        interface: The network interface on which servers listen between nodes; None: the interface that leads to rank
            0.
        secret: A secret that only the processes of the run know; b"": none, and a random text in the store identifies
            the run.
        timeout_s: Seconds to wait for the others, and for answers.

    Attributes:
        world_size: The number of processes.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        roles: Roles,
        *,
        interface: str | None,
        secret: bytes,
        timeout_s: float,
    ) -> None:
        self._store, self._placement, self._roles = store, placement, roles
        self._interface, self._secret, self._timeout_s = interface, secret, timeout_s
        self._silent_s = min(environment.settings().node_timeout_s, _LONGEST_SILENCE_S)
        self.world_size = roles.num_workers + roles.num_servers
        self._gather = StoreGather(store, roles.rank, self.world_size, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"<Meeting of {self.world_size} processes, {self._roles.name}>"

    def exchange(self, value: Any) -> list[Any]:
        """The values of all processes, by rank. Collective.

        Raises:
            CollectiveTimeoutError: Other processes are late.
        """
        return exchange(self._gather, value, what=CALL)

    def agree(self, prepare: Callable[[], Mapping[str, Any]]) -> None:
        """Compare the arguments of all processes. Collective.

        Args:
            prepare: Returns values that must be equal on all processes, in JSON types.

        Raises:
            EvenstepError: As in `validate_on_all_ranks`.
        """
        facts = {"EVENSTEP_SERVERS": self._roles.num_servers, "EVENSTEP_SECRET_FILE": self._secret != b""}
        advice = "Pass the same on all workers and servers."
        validate_on_all_ranks(self, CALL, lambda: {**prepare(), **facts}, advice=advice)

    def find(self, made: Made) -> None:
        """Compare the models of all processes, and get the processes' addresses. Collective.

        Raises:
            MismatchError: The models differ.
        """
        validate_same_model(made.model.named_parameters(), made.model.named_buffers(), self.exchange)
        seen = self.exchange([environment.node_identity(), secrets.token_hex(16)])
        self._nodes, self._most_bytes = [node for node, _ in seen], made.most_bytes
        self._run = seen[0][1]  # differs in each attempt, so that a process of an earlier attempt is refused

    def listen(self, server: Server, held: contextlib.ExitStack) -> Listener:
        """Open the server in this process to calls from other processes.

        Args:
            server: The server.
            held: Removes the socket's folder at the end.

        Raises:
            ConfigurationError: This process can't listen.
        """
        is_one_node = len(set(self._nodes)) == 1
        where = held.enter_context(private_directory("servers")) if is_one_node else self._own_address()
        if not is_one_node and not self._secret and self._roles.server == 0:
            say(
                "evenstep: parameter servers: there is no secret file, so any process that reaches the rendezvous of "
                "this run can take part in it. Give all nodes the same file: evenstep run --secret-file, or "
                "EVENSTEP_SECRET_FILE."
            )
        try:
            listener = Listener(
                where,
                self._badge(self._roles.server),
                server.answer,
                server.lose,
                most_bytes=self._most_bytes,
                silent_s=self._silent_s,
            )
        except OSError as error:
            raise ConfigurationError(
                f"{WHO}{self._roles.name} can't listen at {where}: {error.strerror or error}."
            ) from None
        self._store.set(f"server {self._roles.server}", listener.address)
        return listener

    def connect(self, server: int) -> Client:
        """Connect to a server as soon as it listens.

        Raises:
            PeerLostError: The server has not started in time, or has ended.
        """
        key, name, deadline = f"server {server}", self._roles.name_of_server(server), time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"{self._roles.name} waited {self._timeout_s:g} s for {name} to begin. Read its output: it has to "
                    f"run and to reach `with evenstep.parameter_server`."
                )
            time.sleep(_POLL_S)
        return Client(
            self._store.get(key).decode(),
            self._badge(server),
            self._roles.rank,
            who=self._roles.name,
            server=name,
            timeout_s=self._timeout_s + 2 * TURN_S,
            silent_s=self._silent_s,
            most_bytes=self._most_bytes,
        )

    def open_world(self) -> World:
        """Open the world of all servers. Only servers call this; collective among them."""
        roles, device = self._roles, torch.device("cpu")
        if roles.num_servers == 1:
            return World.alone(device=device)
        store = PrefixStore("servers", self._store)
        placement = placement_from_nodes(self._nodes[roles.num_workers :], roles.server)
        transport = None if placement.num_nodes == 1 else "gloo"
        shared = open_group(store, placement, device, transport, is_for_all=False, timeout_s=self._timeout_s)
        transports = transports_of(shared, device, transport, timeout_s=self._timeout_s)
        on_close = [] if shared is not None else [dist.destroy_process_group]
        return World(placement, device=device, transports=transports, store=store, on_close=on_close)

    def _badge(self, server: int) -> Badge:
        return Badge(self._secret, f"{self._run} server {server}")

    def _own_address(self) -> str:
        """The address at which other nodes reach this process.

        Raises:
            ConfigurationError: There is no such address.
        """
        found: str | None = None
        if self._interface is not None:
            found = next(iter(network.addresses().get(self._interface, [])), None)
        elif self._placement.master_address is not None:
            found = network.address_towards(self._placement.master_address, self._placement.master_port or 1)
        if found is None:
            raise ConfigurationError(
                f"{WHO}{self._roles.name} has no address on "
                f"{'the route to rank 0' if self._interface is None else f'interface={self._interface!r}'}. Name the "
                f"network interface that leads to the other nodes: interface='eth0'."
            )
        return found
