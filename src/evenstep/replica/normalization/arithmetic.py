"""Statistics of one rank's rows, of all ranks' rows, and running statistics. In float64; see `sync_batchnorm`."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.ground.compat.torch_modules import BatchNorm


def local_statistics(x: Tensor) -> Tensor:
    """(count, mean, M2) of one rank's rows: [1 + 2 * num_features], float64. Pure.

    Args:
        x: [n, num_features, ...], n > 0, float32 or float64.
    """
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    count = x.numel() // x.shape[1]
    # `new_tensor` would wait for a GPU.
    return torch.cat([mean.new_full((1,), count, dtype=torch.float64), mean.double(), var.double() * count])


def combine(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the ranks' statistics into the statistics of all rows. Pure.

    Args:
        rows: [num_ranks, 1 + 2 * num_features], float64: (count, mean, M2) of each rank.

    Returns:
        The number of values per channel (0-dim), their mean, [num_features], and their biased variance, [num_features];
        without any row, a variance of 1. All float64.
    """
    counts, means, m2 = rows.tensor_split([1, 1 + rows.shape[1] // 2], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    var = (m2 + counts * (means - mean).square()).sum(0) / divisor
    return count, mean, torch.where(count > 0, var, 1.0)


def update_running_statistics(layer: BatchNorm, count: Tensor, mean: Tensor, var: Tensor) -> None:
    """Count one more batch in a layer's buffers, unless the batch had no rows.

    Args:
        layer: The layer; it may keep no running statistics.
        count: See the result of `combine`.
        mean: See the result of `combine`.
        var: See the result of `combine`.
    """
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(count > 0)
    momentum = (
        layer.num_batches_tracked.double().clamp(min=1).reciprocal() if layer.momentum is None else layer.momentum
    )
    factor = (count > 0).double() * momentum
    unbiased = var * (count / (count - 1).clamp(min=1))
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        running.copy_(running.double() * (1 - factor) + new * factor)
