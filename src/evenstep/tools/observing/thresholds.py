"""The thresholds above which `bench` reports a finding. Pure.

Every number that decides what a user sees is here; docs/reference/bench.md shows this file.
"""

from __future__ import annotations

# ---------------------------------------------------------------------- bench: what is a finding

WORTH = 0.10  # of the step: smaller losses aren't worth the user's time
WORTH_UNSURE = 0.15  # of the step: the limit if the loss has no single cause that could be removed
WORTH_BESIDE_OTHERS = 0.25  # of the step: the limit if other programs make everything longer
MOST_SPREAD = 0.5  # of the step: a loss of this size is reported even if rounds differ more
MANY_ELSEWHERE = 0.3  # cores: with more kept busy by other programs, waits are blamed on these
MOSTLY = 0.7  # of the steps: a rank that is last in so many is last for a reason
DEVIATIONS = 2.5  # standard deviations by which it must also be last more often than by chance
SCHEDULING_S = 0.002  # seconds of a step that a rank may lose because the system ran another program
OFTEN = 0.5  # waits per step: a line that makes the host wait for the GPU so often is named
WELL = 0.9  # efficiency: a lower one should have a cause
