"""A world of one process that plays one rank of several."""

from __future__ import annotations

from evenstep import World


def stub_world(rank: int = 0, world_size: int = 1, *, seed: int | None = None) -> World:
    """A rank whose peers say whatever it says."""
    world = World.alone(device="cpu", seed=seed)
    world.rank, world.world_size = rank, world_size
    world.exchange = lambda value, what="": [value] * world_size
    return world
