"""What stands for `model.reducer`: programs that steer torch's reducer themselves find the calls that they make.

Accelerate calls them in `trigger_sync_in_backward`, Lightning before each backward pass of manual optimisation.
"""

from __future__ import annotations

from typing import Any

from evenstep.replica.gradients.engine import Engine


class Reducer:
    """torch's name for what prepares backward passes, with the calls of it that other programs make.

    Args:
        engine: Of the wrapped model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: torch's reducer isn't set up. What a program may call here are prepare_for_backward, "
            f"prepare_for_forward and _rebuild_buckets; see docs/reference/ddp-compatibility.md for the rest."
        )

    def prepare_for_forward(self) -> None:
        """Nothing: a forward pass needs no preparation."""

    def prepare_for_backward(self, outputs: object = ()) -> None:
        """Have the next backward pass count as the model's own, whatever it goes through.

        Args:
            outputs: Unused: parameters that receive no gradient are found while the pass runs.
        """
        self._engine.prepare()

    def _rebuild_buckets(self) -> bool:
        """Nothing: buckets are laid out again when the first pass has ended. False, as torch's later calls."""
        return False
