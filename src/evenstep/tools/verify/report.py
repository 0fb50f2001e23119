"""The result of `evenstep verify`: a table for users, JSON for programs."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from evenstep.checks import counted
from evenstep.tools.verify.causes import Cause
from evenstep.tools.verify.compare import Difference


@dataclass(frozen=True)
class Verdict:
    """The result of the run on one number of ranks.

    Attributes:
        num_ranks: The number of ranks.
        apart: The relative distance of gradients and parameters from those on the fewest ranks; 0: identical bits.
        difference: The first difference that rounding doesn't explain; None if there is none.
        causes: The causes of the difference, and faults that make no difference to gradients.
        rounding: The relative rounding of a typical tensor; None if it wasn't measured.
    """

    num_ranks: int
    apart: float
    difference: Difference | None
    causes: tuple[Cause, ...] = ()
    rounding: float | None = None

    @property
    def is_fine(self) -> bool:
        """Whether there is no difference and no fault."""
        return self.difference is None and not self.causes

    @property
    def word(self) -> str:
        """The verdict as one word, for programs."""
        if self.difference is not None:
            return "differs"
        if self.causes:
            return "faulty"
        return "identical" if self.apart == 0 else "equal"

    def text(self, *, is_reproducible: bool) -> str:
        """The verdict as a text for users, without the causes."""
        if self.difference is not None:
            return f"differs: {self.difference}"
        if any(cause.kind == "no gradient" for cause in self.causes):
            return "nothing to compare: every gradient is zero"
        if self.apart == 0:
            return "identical bits"
        received = f"equal to {self.apart:.0e}, as expected without reproducible mode"
        return f"equal to {self.apart:.0e}, although the mode is reproducible" if is_reproducible else received


@dataclass(frozen=True)
class Report:
    """The results of one script.

    Attributes:
        script: The path of the script.
        num_steps: The number of steps compared.
        base: The number of ranks of the run that the others are compared with.
        num_virtual_ranks: The number of virtual ranks in reproducible mode; 0: it is off.
        verdicts: One verdict for each other number of ranks.
        faults: The faults of the run that the others are compared with.
    """

    script: str
    num_steps: int
    base: int
    num_virtual_ranks: int
    verdicts: tuple[Verdict, ...]
    faults: tuple[Cause, ...] = ()

    @property
    def is_fine(self) -> bool:
        """Whether no run has a difference or a fault."""
        return not self.faults and all(verdict.is_fine for verdict in self.verdicts)

    @property
    def causes(self) -> list[tuple[int, Cause]]:
        """(number of ranks of the run, cause) for the first cause of each kind. `Cause.is_note` is its severity."""
        runs = [(self.base, self.faults), *((verdict.num_ranks, verdict.causes) for verdict in self.verdicts)]
        found: dict[str, tuple[int, Cause]] = {}
        for number, causes in runs:
            for cause in causes:
                found.setdefault(cause.kind, (number, cause))
        return list(found.values())

    def as_json(self) -> str:
        """The report as JSON; see docs/reference/verify.md."""
        runs = [
            {
                "ranks": verdict.num_ranks,
                "verdict": verdict.word,
                "apart": verdict.apart if math.isfinite(verdict.apart) else None,
                "rounding": verdict.rounding,
                "difference": _plain(verdict.difference),
                "causes": [_plain_cause(cause) for cause in verdict.causes],
            }
            for verdict in self.verdicts
        ]
        received: dict[str, Any] = {
            "script": self.script,
            "steps": self.num_steps,
            "compared_with": self.base,
            "virtual_ranks": self.num_virtual_ranks,
            "fine": self.is_fine,
            "faults": [_plain_cause(cause) for cause in self.faults],
            "runs": runs,
        }
        return json.dumps(received, indent=2)

    def show(self, console: Console) -> None:
        """Print the table, and the causes below it."""
        mode = f", {self.num_virtual_ranks} virtual ranks" if self.num_virtual_ranks else ""
        title = f"{self.script}: {self.num_steps} steps, compared with {self.base} rank" + (
            "s" if self.base > 1 else ""
        )
        table = Table(title=title + mode, title_justify="left", show_edge=False)
        table.add_column("ranks", justify="right")
        table.add_column("losses, gradients, parameters")
        for verdict in self.verdicts:
            table.add_row(str(verdict.num_ranks), verdict.text(is_reproducible=bool(self.num_virtual_ranks)))
        console.print(table)
        for number, cause in self.causes:
            at = f"{os.path.relpath(cause.path)}:{cause.line}: " if cause.path else ""
            text = f"{counted(number, 'rank')}: {at}{cause.text}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        for verdict in self.verdicts:
            if verdict.difference is not None and not verdict.causes:
                console.print(
                    f"{counted(verdict.num_ranks, 'rank')}: none of the usual causes shows in what the ranks "
                    f"have seen.",
                    soft_wrap=True,
                )


def _plain_cause(cause: Cause) -> dict[str, Any]:
    return {**asdict(cause), "is_note": cause.is_note}


def _plain(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    plain = asdict(difference)
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in plain.items()
    }
