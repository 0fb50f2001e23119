"""What a rank under watch writes down of a script that trains in this process, and how it ends its epochs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from evenstep.tools.doctor.run.events import Event, EventFile, Plan
from evenstep.tools.doctor.run.probe import Probe
from evenstep.tools.observing.patching import Patches

DATA = TensorDataset(torch.arange(64.0).reshape(32, 2), torch.ones(32, 1))


def watched(directory: Path, script: Callable[[], object], *, num_steps: int = 6) -> list[Event]:
    """The events of a function, as if this file were the script."""
    plan = Plan(str(directory), num_steps, 1)
    with Patches() as patches:
        Probe(plan, 0, __file__).install(patches)
        script()
    return EventFile(plan.file_of(0)).read()


def of(events: list[Event], kind: str) -> list[Event]:
    return [each for each in events if each.kind == kind]


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> None:
        loss = F.mse_loss(self.model(x), y) * factor
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_epochs_end_after_half_of_the_steps_and_then_after_a_batch(tmp_path: Path) -> None:
    trainer, loader = Trainer(), DataLoader(DATA, batch_size=2)

    def script() -> None:
        for _ in range(4):
            for x, y in loader:
                trainer.step(x, y)

    events = watched(tmp_path, script)
    assert [(each["num_batches"], each["cut"]) for each in of(events, "iterated")] == [
        (3, True),
        (3, True),
        (1, True),
        (1, True),
    ]
    assert [each.step for each in of(events, "stepped")] == list(range(8))
    (over,) = of(events, "over")
    assert over.step == 6
    assert [each["iteration"] for each in of(events, "iterate")] == [0, 1, 2, 3]
    assert "looks" in of(events, "iterate")[0].facts
    assert "looks" not in of(events, "iterate")[1].facts


@pytest.mark.parametrize(("factor", "told"), [(0.25, 0.25), (1.0, 1.0)])
def test_the_factor_of_a_loss_is_told_without_that_of_a_scaler(factor: float, told: float, tmp_path: Path) -> None:
    trainer, scaler = Trainer(), torch.amp.GradScaler("cpu", init_scale=64.0)
    x, y = DATA[:4]

    def script() -> None:
        scaler.scale(F.mse_loss(trainer.model(x), y) * factor).backward()
        (F.mse_loss(trainer.model(x), y, reduction="sum") / 4).backward()

    events = watched(tmp_path, script)
    facts = [(each["factor"], each["is_mean"], each["is_sum"]) for each in of(events, "backward")]
    assert facts == [(told, True, False), (0.25, False, False)]
