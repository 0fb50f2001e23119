"""The thresholds above which `bench` reports a finding. Pure.

Every number that decides what a user sees is here; docs/reference/bench.md shows this file.
"""

from __future__ import annotations

# ---------------------------------------------------------------------- bench: what is a finding

WORTH = 0.10  # of the step: what smaller losses cost isn't worth a person's time
WORTH_UNSURE = 0.15  # of the step: where the cause is no single thing that could be removed
WORTH_BESIDE_OTHERS = 0.25  # of the step: where other programs make everything longer, in ways that nobody measures
MOST_SPREAD = 0.5  # of the step: a loss as large is reported however much rounds differ
MANY_ELSEWHERE = 0.3  # cores that other programs keep busy, before they are taken for the reason of waits
MOSTLY = 0.7  # of the steps in which one rank is last: then it is last for a reason
DEVIATIONS = 2.5  # standard deviations by which it must also be last more often than chance makes one of equal ranks
SCHEDULING_S = 0.002  # seconds of a step that a rank may lose because the system ran something else
OFTEN = 0.5  # times a step that a line makes the host wait for the GPU
WELL = 0.9  # efficiency: a lower one should have a cause
