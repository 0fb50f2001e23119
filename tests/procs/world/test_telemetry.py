"""What ranks record of their steps, and that who is late is seen before the collective hides it."""

import statistics
import time
from typing import Any

import torch

import evenstep
from evenstep.ground.health.telemetry import StepTimes
from evenstep.testing import RankPool


class Slow(torch.nn.Module):
    """Sleeps in the backward pass of one rank."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(300, 300), torch.nn.Linear(300, 60)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.seconds and hidden.requires_grad:
            hidden.register_hook(lambda grad: time.sleep(self.seconds))
        out: torch.Tensor = self.last(hidden)
        return out


def record(seconds: list[float]) -> list[StepTimes]:
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(Slow(seconds[world.rank]), bucket_cap_mb=0.1, world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        model.backward(model(torch.randn(4, 300)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    # Not the last one from before: models of earlier tests may have gone in the meantime.
    return world.telemetry.steps(world.telemetry.recorders.index(model.engine.recorder))


def test_who_is_late_was_ready_late_and_who_was_not_waited(ranks: RankPool) -> None:
    """All ranks end their backward pass at the same moment: only the time before the collective tells them apart."""
    recorded: list[Any] = ranks.run(record, 3, [0.0, 0.2, 0.0])
    # Medians: on a busy machine any rank may be late once.
    ready = [statistics.median(max(times.ready_s) for times in steps[1:]) for steps in recorded]
    waited = [statistics.median(times.wait_s for times in steps[1:]) for steps in recorded]
    assert ready[1] > 0.2
    assert ready[0] < 0.1 > ready[2]
    assert waited[0] > 0.1 < waited[2]
