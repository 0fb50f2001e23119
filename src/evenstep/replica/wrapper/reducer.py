"""A stand-in for `model.reducer`, for programs that call torch's reducer directly.

Accelerate calls its methods in `trigger_sync_in_backward`, Lightning before each backward pass of manual optimisation.
"""

from __future__ import annotations

from typing import Any

from evenstep.replica.gradients.engine import Engine


class Reducer:
    """Prepares backward passes. Has torch's name, and the methods of torch's class that other programs call.

    Args:
        engine: The wrapped model's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: torch's reducer isn't set up. A program may call prepare_for_backward, prepare_for_forward and "
            f"_rebuild_buckets here; for the rest see docs/reference/ddp-compatibility.md."
        )

    def prepare_for_forward(self) -> None:
        """Do nothing: a forward pass needs no preparation."""

    def prepare_for_backward(self, outputs: object = ()) -> None:
        """Make the next backward pass count as the model's own, even if it reaches none of the model's outputs.

        Args:
            outputs: Unused: parameters that receive no gradient are found while the pass runs.
        """
        self._engine.prepare()

    def _rebuild_buckets(self) -> bool:
        """Do nothing, since buckets are laid out again when the first pass has ended.

        Returns False, as later calls of torch's method do.
        """
        return False
