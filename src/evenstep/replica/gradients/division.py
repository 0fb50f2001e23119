"""Division: the divisor of a window's gradients, and where it is applied.

[Note: one division]

Every rank has a row (`transport.base.Row`): the sum of its window's weights, and whether the window is weighted or
plain. One function computes the divisor from the sum of all rows (`transport.core.reduction.divisor_of`). The divisor
is applied once:

    shared memory        by the transport, to each part of a sum as it stores it; the rows come with the call
    other transports     by the engine, when the window ends: the header carries the sum of the rows
    one rank, LocalSGD   by the engine, from the rank's own row

Two kinds of gradients are divided by a factor of the divisor before they are added, and by the rest afterwards:

    float16, plain       divided by the number of ranks as they are packed; 64 ranks with 1,500 each would give infinity
    for a hook           in a weighted window, divided by the mean weight (`AgreedScale.divide_by_total`); the hook
                         averages over ranks
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from evenstep.ground.computing.device import by_kind
from evenstep.replica.gradients.window import Kind, Window
from evenstep.transport.base import Row
from evenstep.transport.core.reduction import divisor_of


def row_of(kind: Kind | None, weight: float | Tensor, scale: float) -> Row:
    """This rank's row; reads a weight that is a tensor.

    Args:
        kind: The window's kind; None: the window had no pass.
        weight: The sum of the window's weights.
        scale: The scale by which weights were divided before they multiplied gradients.
    """
    return Row(float(weight) / scale, float(kind is Kind.WEIGHTED), float(kind is Kind.PLAIN))


def divisor_on_device(weight: Tensor, num_weighted: Tensor, plain: float | Tensor) -> Tensor:
    """`divisor_of` for a sum of rows on a GPU, without reading it on the host: 0-dim."""
    return torch.where(num_weighted > 0, torch.where(weight > 0, weight, torch.inf), plain)


def divide_alone(parameters: Iterable[Tensor], window: Window, *, plain: float, scale: float) -> None:
    """Divide `p.grad` at the end of a window in which no other rank takes part.

    Args:
        parameters: The trained parameters.
        window: This rank's window.
        plain: The divisor of a plain window.
        scale: As in `row_of`.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if isinstance(window.weight, Tensor):
        zero_where(window.weight == 0, grads)
        weight = window.weight.double() / scale
        divide(grads, divisor_on_device(weight, torch.ones_like(weight), plain))
    else:
        divide(grads, divisor_of([row_of(window.kind, window.weight, scale)], plain))


def divide(gradients: Iterable[Tensor], divisor: float | Tensor) -> None:
    """Divide gradients in place. Multiplying by the inverse would give different bits.

    Args:
        gradients: Dense or sparse.
        divisor: A number, or a 0-dim tensor, which isn't read on the host.
    """
    if not isinstance(divisor, Tensor) and divisor == 1:
        return
    for same in by_kind(gradients):
        device, by = same[0].device, divisor
        if isinstance(by, Tensor):
            by = by.to(device)
        elif device.type != "cpu":  # a GPU would multiply by the inverse of a number
            by = torch.full((), by, dtype=torch.float64, device=device)
        torch._foreach_div_(same, by)


def zero_where(condition: Tensor, gradients: Iterable[Tensor]) -> None:
    """Set gradients to zero if a condition holds, without reading the condition on the host."""
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        values.masked_fill_(condition.to(gradient.device), 0)
