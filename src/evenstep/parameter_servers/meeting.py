"""How the processes of a run find each other: addresses, and what proves who belongs to it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from evenstep import network
from evenstep.console import say
from evenstep.errors import ConfigurationError, PeerLostError
from evenstep.ground import environment
from evenstep.ground.environment import Placement, placement_from_nodes
from evenstep.parameter_servers.preparation import WHO, Roles
from evenstep.parameter_servers.server import TURN_S, Server
from evenstep.parameter_servers.wire import Badge, Client, Listener
from evenstep.temporary import private_directory
from evenstep.transport.factory import Transports, open_shared_memory, open_transports
from evenstep.world import World

_POLL_S = 0.05
_SILENT_S = 30.0  # as `evenstep run --node-timeout` by default
_LONGEST_SILENCE_S = 86_400.0  # `--node-timeout inf`: sockets want a number


class Meeting:
    """One process's way to the others.

    Args:
        store: Of this run.
        placement: This process's.
        roles: This process's.
        nodes: The node of each process, by rank.
        most_bytes: Of the tensors of one message.
        interface: On which servers listen between nodes; None: the one that leads to rank 0.
        secret: What all processes of the run know, and nobody else; b"": what is in the store has to do.
        timeout_s: How long to wait for the servers, and for answers.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        roles: Roles,
        nodes: Sequence[str],
        *,
        most_bytes: int,
        interface: str | None,
        secret: bytes,
        timeout_s: float,
    ) -> None:
        self._store, self._placement, self._roles, self._nodes = store, placement, roles, nodes
        self._most_bytes, self._interface, self._secret, self._timeout_s = most_bytes, interface, secret, timeout_s
        self._silent_s = min(environment.settings().node_timeout_s or _SILENT_S, _LONGEST_SILENCE_S)
        # Another one in each attempt: a process of the attempt before is a stranger.
        self._run = store.compare_set("run", "", secrets.token_hex(16)).decode()

    def __repr__(self) -> str:
        return f"<Meeting of {len(self._nodes)} processes, {self._roles.name}>"

    def listen(self, server: Server, held: contextlib.ExitStack) -> Listener:
        """Have others call a server of this process.

        Args:
            server: It.
            held: Removes at the end what lies on the disk.

        Raises:
            ConfigurationError: It can't listen.
        """
        is_one_node = len(set(self._nodes)) == 1
        where = held.enter_context(private_directory("servers")) if is_one_node else self._own_address()
        if not is_one_node and not self._secret and self._roles.server == 0:
            say(
                "evenstep: parameter servers: there is no secret file, so whoever reaches the rendezvous of this run "
                "can take part in it. Give all nodes one: evenstep run --secret-file, or EVENSTEP_SECRET_FILE."
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
        """Call a server, as soon as it listens.

        Raises:
            PeerLostError: It has not begun in time, or has gone.
        """
        key, name, deadline = f"server {server}", self._roles.name_of_server(server), time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"{self._roles.name} waited {self._timeout_s:g} s for {name} to begin. Look at what it says: it "
                    f"has to run and to come to `with evenstep.parameter_server`."
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
        """The world of all servers, to which alone this belongs. Collective among them."""
        roles, device = self._roles, torch.device("cpu")
        if roles.num_servers == 1:
            return World.alone(device=device)
        store = PrefixStore("servers", self._store)
        placement = placement_from_nodes(self._nodes[roles.num_workers :], roles.server)
        shared, on_close = None, []
        if placement.num_nodes == 1:
            shared = open_shared_memory(store, roles.server, roles.num_servers, timeout_s=self._timeout_s)
        if shared is not None:
            transports = Transports(shared, shared.split(), self._timeout_s)
        else:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=roles.server,
                world_size=roles.num_servers,
                timeout=timedelta(seconds=self._timeout_s),
            )
            transports = open_transports("gloo", device, timeout_s=self._timeout_s)
            on_close = [dist.destroy_process_group]
        return World(placement, device=device, transports=transports, store=store, on_close=on_close)

    def _badge(self, server: int) -> Badge:
        return Badge(self._secret, f"{self._run} server {server}")

    def _own_address(self) -> str:
        """On which other nodes reach this process.

        Raises:
            ConfigurationError: It isn't known.
        """
        found: str | None = None
        if self._interface is not None:
            found = next(iter(network.addresses().get(self._interface, [])), None)
        elif self._placement.master_address is not None:
            found = network.address_towards(self._placement.master_address, self._placement.master_port or 1)
        if found is None:
            raise ConfigurationError(
                f"{WHO}{self._roles.name} has no address on "
                f"{'the way to rank 0' if self._interface is None else f'interface={self._interface!r}'}. Name the "
                f"network interface that leads to the other nodes: interface='eth0'."
            )
        return found
