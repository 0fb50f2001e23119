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


def record(seconds: list[float], accumulate: int, num_steps: int = 4) -> tuple[list[StepTimes], int, int, float]:
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(Slow(seconds[world.rank]), bucket_cap_mb=0.1, world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(num_steps):
        for part in model.microbatches(torch.randn(4 * accumulate, 300), accumulate):
            model.backward(model(part).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    recorder = model.engine.recorder
    sizes = sum(bucket.flat.nbytes for bucket in model.engine.buckets)
    assert recorder.bucket_bytes == sizes
    # Not the last one from before: models of earlier tests may have gone in the meantime.
    steps = world.telemetry.steps(world.telemetry.recorders.index(recorder))
    return (
        steps,
        len(model.engine.buckets),
        recorder.peak_bucket_bytes // sizes,
        len(recorder.marks()) / 2 / len(recorder.steps()),
    )


def test_steps_are_recorded(ranks: RankPool) -> None:
    for accumulate in (1, 3):
        for steps, num_buckets, most, num_marks in ranks.run(record, 2, [0.0, 0.0], accumulate):
            assert len(steps) == 4
            assert num_buckets == 2
            assert 1 <= most <= 2
            for times in steps:
                assert len(times.ready_s) == num_buckets
                assert min(times.forward_s, times.backward_s, times.wait_s, times.optimizer_s) > 0
            assert num_marks <= 3 * accumulate + num_buckets + 5


def test_who_is_late_was_ready_late_and_who_was_not_waited(ranks: RankPool) -> None:
    """All ranks end their backward pass at the same moment: only the time before the collective tells them apart."""
    recorded: list[Any] = ranks.run(record, 3, [0.0, 0.2, 0.0], 1, 10)
    # Medians: on a busy machine any rank may be late once.
    ready = [statistics.median(max(times.ready_s) for times in steps[1:]) for steps, *_ in recorded]
    waited = [statistics.median(times.wait_s for times in steps[1:]) for steps, *_ in recorded]
    assert ready[1] > 0.2
    assert ready[0] < 0.1 > ready[2]
    assert waited[0] > 0.1 < waited[2]
