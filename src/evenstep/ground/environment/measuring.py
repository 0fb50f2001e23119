"""Settings that `evenstep bench` passes to the ranks of a run that it measures. Variables in and out; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evenstep.ground.environment.values import integer


@dataclass(frozen=True)
class Measurement:
    """The settings of a measured run.

    Attributes:
        directory: Where every rank leaves its record.
        num_warmup: Optimizer steps that are made first and not counted.
        num_steps: Optimizer steps that are counted; then the run ends, with status 0.
        global_batch_size: Samples of a step on all ranks together, instead of what the script says; None: as it says.
        growth: What is measured in other units than samples (`max_tokens`) is multiplied by this.
        watches_losses: Whether ranks record losses, and begin with a seed.
    """

    directory: Path
    num_warmup: int
    num_steps: int
    global_batch_size: int | None = None
    growth: int = 1
    watches_losses: bool = False

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> Measurement | None:
        """Read what `variables` has written; None if this run isn't measured."""
        directory = variables.get("EVENSTEP_BENCH_DIR")
        if not directory:
            return None
        return cls(
            Path(directory),
            num_warmup=integer(variables, "EVENSTEP_BENCH_WARMUP", default=0),
            num_steps=integer(variables, "EVENSTEP_BENCH_STEPS", default=1),
            global_batch_size=integer(variables, "EVENSTEP_BENCH_BATCH", default=0) or None,
            growth=integer(variables, "EVENSTEP_BENCH_GROWTH", default=1),
            watches_losses=bool(integer(variables, "EVENSTEP_BENCH_LOSSES", default=0)),
        )

    def variables(self) -> dict[str, str]:
        """The variables of the run's ranks."""
        return {
            "EVENSTEP_BENCH_DIR": str(self.directory),
            "EVENSTEP_BENCH_WARMUP": str(self.num_warmup),
            "EVENSTEP_BENCH_STEPS": str(self.num_steps),
            "EVENSTEP_BENCH_BATCH": str(self.global_batch_size or 0),
            "EVENSTEP_BENCH_GROWTH": str(self.growth),
            "EVENSTEP_BENCH_LOSSES": str(int(self.watches_losses)),
        }
