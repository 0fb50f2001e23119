"""What was reduced in an earlier window, while a later one adds to it.

Without `zero_grad` between two synchronised passes the second adds to the reduced gradient R. A PLAIN pass may leave
R where it is: averaging equal values changes nothing. A WEIGHTED pass would multiply R by the number of ranks over the
sum of weights, so R is set aside and added back. A rank without a pass does as was right for the last window. Lanes
are added without R, too: it is set aside before the loop, since in a PLAIN pass some gradients may have come already.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from evenstep.replica.exchange import Exchange


class Carried:
    """Gradients that a window doesn't reduce again.

    Args:
        parameters: Of the model.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._out_of_the_way: list[tuple[nn.Parameter, Tensor]] = []

    def set_aside(self, exchange: Exchange) -> None:
        """Before a WEIGHTED window, or lanes: keep what an earlier reduction left in `p.grad` out of the sum."""
        if all(parameter.grad is None for parameter in self._parameters):
            return
        # zero_grad(set_to_none=False): nothing to keep, and the views stay where they are.
        clear = {p for each in exchange.buckets if each.hides or exchange.is_clear(each) for p in each.parameters}
        for parameter in self._parameters:
            if parameter.grad is not None and parameter not in clear:
                self._gradients.append((parameter, parameter.grad.clone()))
                parameter.grad = None

    def make_way(self, exchange: Exchange) -> None:
        """A WEIGHTED pass may come whose first gradients nobody tells of: have it add to nothing that is here."""
        hidden = {p for bucket in exchange.buckets if bucket.hides for p in bucket.parameters}
        for parameter in self._parameters:
            if parameter.grad is not None and parameter not in hidden:
                self._out_of_the_way.append((parameter, parameter.grad))
                parameter.grad = None

    def keep(self) -> None:
        """It has come: what was put out of its way is set aside."""
        self._gradients += [(parameter, grad.clone()) for parameter, grad in self._out_of_the_way]
        self._out_of_the_way = []

    def give_way_back(self) -> None:
        """It has not come: everything is where it was."""
        for parameter, grad in self._out_of_the_way:
            parameter.grad = grad
        self._out_of_the_way = []

    def add_back(self) -> None:
        """The window has ended, or was none."""
        for parameter, grad in self._gradients:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        self._gradients = []

    def forget(self) -> None:
        """The window has failed, and nobody wants its gradients."""
        self._gradients = []
        self._out_of_the_way = []
