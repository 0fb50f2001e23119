"""torchmetrics over an evaluation loader: metrics that add up over ranks themselves give what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import evenstep
from evenstep import DataLoader
from evenstep.testing import RankPool


def measured(size: int, seed: int, num_workers: int) -> tuple[dict[str, Any], int]:
    """All metrics as this rank computes them, and how many samples it has seen."""
    import torchmetrics  # some seconds: only in the ranks, which stay
    from torchmetrics import classification, regression

    evenstep.init(quiet=True)
    generator = torch.Generator().manual_seed(seed)
    # Probabilities: scores are taken for such update by update, and a small share may lie between 0 and 1 by chance.
    scores, classes = torch.randn(size, 3, generator=generator).softmax(1), torch.arange(size) % 3
    context = "fork" if num_workers else None
    loader = DataLoader(TensorDataset(scores, classes), 8, num_workers=num_workers, multiprocessing_context=context)
    of_classes = {
        "accuracy": classification.MulticlassAccuracy(3, average="micro"),
        "confusion": classification.MulticlassConfusionMatrix(3),
        "area": classification.MulticlassAUROC(3),  # keeps all predictions, of which ranks have more or fewer
    }
    of_values = {"mean": torchmetrics.MeanMetric(), "error": regression.MeanSquaredError()}
    num_samples = 0
    for x, y in loader:
        num_samples += len(x)
        if len(x):  # classification refuses a batch of none
            for metric in of_classes.values():
                metric.update(x, y)
            of_values["mean"].update(x[:, 0])
            of_values["error"].update(x[:, 1], x[:, 2])
    return {name: metric.compute().tolist() for name, metric in (of_classes | of_values).items()}, num_samples


@pytest.mark.extended
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize(("size", "num_workers"), [(33, 0), (35, 1), (3, 0)])
def test_metrics_are_those_of_one_process(
    ranks: RankPool, nproc: int, size: int, num_workers: int, fresh_seed: int
) -> None:
    """Of the last global batch some ranks have one sample less, or none."""
    ((alone, num_samples),) = ranks.run(measured, 1, size, fresh_seed, 0)
    assert num_samples == size
    of_ranks = ranks.run(measured, nproc, size, fresh_seed, num_workers)
    shares = [num_samples for _, num_samples in of_ranks]
    assert sum(shares) == size
    assert len(set(shares)) > 1 or size % nproc == 0
    for found, _ in of_ranks:
        assert found["confusion"] == alone["confusion"]
        for name in ("accuracy", "area", "mean", "error"):
            assert found[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name
