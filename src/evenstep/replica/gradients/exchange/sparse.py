"""Sparse gradients: the used rows of an embedding, added over ranks without becoming dense."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.transport.core.object_collectives import gather_rows
from evenstep.transport.core.transport import Transport


def sum_over_ranks(grad: Tensor | None, like: Tensor, transport: Transport, control: Transport) -> Tensor:
    """Add a sparse gradient over ranks. Each rank sends only the rows that it has.

    Collective: every rank calls this for the same parameters, in the same order.

    Args:
        grad: This rank's gradient, sparse or dense; None if it has none.
        like: The parameter: [num_rows, ...].
        transport: Carries tensors on the gradient's device.
        control: Carries the number of rows of each rank, in order with the model's other calls.

    Returns:
        The sum, sparse and coalesced, equal on all ranks: rows are added in order of rank.
    """
    if grad is None:
        indices = torch.empty(1, 0, dtype=torch.int64, device=like.device)
        grad = torch.sparse_coo_tensor(indices, like.new_empty(0, *like.shape[1:]), like.shape, check_invariants=False)
    elif not grad.is_sparse:
        grad = grad.to_sparse(1)
    grad = grad.detach().coalesce()
    rows = gather_rows(transport, control, grad.indices().t())
    values = gather_rows(transport, control, grad.values())
    return torch.sparse_coo_tensor(rows.t(), values, like.shape, check_invariants=False).coalesce()
