"""A world of one process that plays one rank of several, or all of them in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evenstep import World
from evenstep.transport.core.codec import decode, encode


def stub_world(rank: int = 0, world_size: int = 1, *, seed: int | None = None) -> World:
    """A rank whose peers say whatever it says."""
    world = World.alone(device="cpu", seed=seed)
    world.rank, world.world_size = rank, world_size
    world.exchange = lambda value, what="": [value] * world_size
    return world


def on_threads(work: Callable[[World], Any], *sizes: int) -> list[Any]:
    """What `work` returns on each rank of nodes of these sizes: threads that wait for each other to exchange."""
    places = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    barrier, said = threading.Barrier(len(places), timeout=60), [b""] * len(places)

    def run(rank: int) -> Any:
        world = stub_world(rank, len(places))
        world.node_rank, world.local_rank = places[rank]
        world.num_nodes, world.local_world_size = len(sizes), sizes[world.node_rank]

        def exchange(value: Any, what: str = "") -> list[Any]:
            said[rank] = encode(value)
            barrier.wait()
            found = [decode(each) for each in said]
            barrier.wait()
            return found

        world.exchange = exchange
        world.broadcast_object = lambda value, src=0: exchange(value)[src]
        try:
            return work(world)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(run, range(len(places))))
