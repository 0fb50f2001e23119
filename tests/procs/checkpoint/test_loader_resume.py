"""A loader with workers that augment, saved in the middle of an epoch and resumed, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import evenstep
from evenstep import World
from evenstep.checkpoint.checkpointer import Checkpointer


class Augmented(Dataset):
    """Samples with random numbers of two kinds added, drawn where they are loaded: in the workers."""

    def __len__(self):
        return 40

    def __getitem__(self, index: int):
        return torch.full((3,), float(index)) + 0.1 * torch.rand(3) + 0.01 * random.random()


def train(directory: Path, upto: int, *, seed: int):
    """The batches of each step, and the parameters at the end; in one process."""
    world = World.alone(device="cpu")
    torch.manual_seed(seed)
    model = evenstep.DistributedDataParallel(nn.Linear(3, 2), world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    loader = evenstep.DataLoader(
        Augmented(), global_batch_size=6, shuffle=True, num_workers=2, sample_seed=True, seed=5, world=world
    )
    checkpoint = Checkpointer(
        directory, world=world, every_minutes=None, model=model, optimizer=optimizer, scaler=scaler, loader=loader
    )
    checkpoint.resume()
    seen = []
    for _ in loader.epochs(3):
        for x in loader:
            seen.append(x)
            loss = model(x).square().mean()
            # Every third step overflows: the scaler leaves it out, and its samples are consumed all the same.
            factor = float("inf") if (checkpoint.num_steps + 1) % 3 == 0 else 1.0
            model.backward(loss * factor, weight=len(x), scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            checkpoint.step()
            if checkpoint.num_steps == upto:
                checkpoint.close()
                return seen, [p.detach().clone() for p in model.parameters()], scaler.state_dict()
    raise AssertionError("the run was longer than its data")


def test_workers_augmentation_and_skipped_steps_go_on(tmp_path: Path):
    straight, parameters, scale = train(tmp_path / "straight", 17, seed=1)
    first, _, _ = train(tmp_path / "turns", 6, seed=1)  # in the first epoch, after a step that was left out
    second, _, _ = train(tmp_path / "turns", 9, seed=2)  # in the second
    third, resumed, resumed_scale = train(tmp_path / "turns", 17, seed=3)
    seen = first + second + third
    assert len(seen) == len(straight) == 17
    for step, (ours, theirs) in enumerate(zip(seen, straight, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(resumed, parameters, strict=True))
    assert resumed_scale == scale
