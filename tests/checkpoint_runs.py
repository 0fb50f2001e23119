"""Small runs to be saved, killed and resumed, and ways to damage what they have saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import evenstep
from evenstep.checkpoint.checkpointer import Checkpointer


class Positions:
    """The least that a loader must remember: how many samples all ranks have consumed."""

    def __init__(self, batch_size: int = 6) -> None:
        self.batch_size = batch_size
        self.position = 0

    def take(self, rank: int, world_size: int) -> list[int]:
        """This rank's samples of the next global batch."""
        batch = range(self.position, self.position + self.batch_size)
        self.position += self.batch_size
        return list(batch)[rank::world_size]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Average:
    """An exponential average of parameters: an object of the user's own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        for value, parameter in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "note": ("a tuple", 1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)
        assert state["note"] == ("a tuple", 1)


class Training:
    """A run with everything that has a state: dropout, batch norm, momentum, a scheduler, a scaler, an average.

    Attributes:
        seen: The samples of each step, of this rank.
        losses: Of each step, of this rank.
    """

    def __init__(
        self,
        directory: Any,
        world: evenstep.World,
        *,
        width: int = 8,
        seed: int = 1,
        plain: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.world = world
        layers = [nn.Linear(4, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.3), nn.Linear(width, 2)]
        self.plain = plain  # nothing whose answer depends on the number of ranks
        self.model = nn.Sequential(layers[0], layers[2], layers[4]).double() if plain else nn.Sequential(*layers)
        self.wrapped = evenstep.DistributedDataParallel(self.model, world=world)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[3, 7], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.average = Average(self.model)
        self.loader = Positions()
        self.seen: list[list[int]] = []
        self.losses: list[float] = []
        self.checkpoint = Checkpointer(
            directory,
            world=world,
            model=self.wrapped,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            average=self.average,
            loader=self.loader,
            **options,
        )

    def step(self) -> None:
        """One step on the next samples; augmented with random numbers of three kinds."""
        samples = self.loader.take(self.world.rank, self.world.world_size)
        self.seen.append(samples)
        x = torch.stack([torch.sin(torch.arange(4.0) + s) for s in samples])
        if self.plain:
            x = x.double()
        else:
            x = x + 0.1 * torch.randn_like(x) + 0.01 * random.random()
        loss = self.wrapped(x).square().mean()
        self.wrapped.backward(loss, weight=len(samples), scaler=self.scaler)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.average.update()
        self.losses.append(float(loss.detach()))
        self.checkpoint.step()

    def run_to(self, step: int) -> Training:
        """Train until so many steps were made."""
        while self.checkpoint.num_steps < step:
            self.step()
        return self

    def everything(self) -> dict[str, Any]:
        """All that must be equal after a resume, down to the next random number."""
        state: dict[str, Any] = {
            **{f"model.{k}": v.clone() for k, v in self.model.state_dict().items()},
            **{f"average.{i}": v.clone() for i, v in enumerate(self.average.values)},
            "scheduler": dict(self.scheduler.state_dict()),
            "scaler": self.scaler.state_dict(),
            "position": self.loader.position,
            "next torch": torch.get_rng_state().clone(),
            "next python": random.getstate(),
        }
        for i, parameter in enumerate(self.model.parameters()):
            kept = self.optimizer.state[parameter]
            state |= {f"optimizer.{i}.{k}": v.clone() for k, v in kept.items() if isinstance(v, Tensor)}
        return state


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
        assert same, f"{name}: {value} is not {theirs[name]}"


def is_same(ours: Any, theirs: Any, tolerance: float = 0.0) -> bool:
    """Whether nested states are equal: numbers to the bit, or within a tolerance."""
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs) or bool(tolerance and torch.allclose(ours, theirs, tolerance, tolerance))
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(is_same(ours[key], theirs[key], tolerance) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(is_same(*pair, tolerance) for pair in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def files_of(directory: Path, folder: str) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(path for path in (directory / folder).iterdir() if path.is_file())


def flips(generator: random.Random, paths: list[Path], count: int) -> Iterator[tuple[Path, int]]:
    """Random single bits over all files, each file as likely as the others."""
    for _ in range(count):
        path = generator.choice(paths)
        yield path, generator.randrange(path.stat().st_size * 8)


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file around."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


class PatientRanks:
    """The pool, with more time: the first optimizer or mesh in a process imports half of torch."""

    def __init__(self, pool: Any):
        self.pool = pool

    def run(self, fn: Any, nproc: int, *args: Any) -> list[Any]:
        return self.pool.run(fn, nproc, *args, timeout_s=160.0)


def world_for_this_test() -> evenstep.World:
    """The world of a rank that is kept between tests, as at its beginning."""
    world = evenstep.init(quiet=True)
    world.has_diverged = False
    world.stop_reason = None
    return world


class Tensors:
    """An object of the user's own with tensors in its state, whole or DTensors."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state) -> None:
        self.values = dict(state)
