"""The thresholds of `bench` and `verify`: from when on something is reported. Pure.

Every number that decides what a user is shown stands here; docs/reference/thresholds.md shows this file.
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

# ---------------------------------------------------------------------- verify: what is a difference

ROUNDING_FACTOR = 16.0  # times the base run's distance from float64 that other runs may lie from it
SHRINKS_TO = 1e-4  # of a difference that may be left in float64, if it was rounding
COARSE = 1e-4  # relative rounding above which float32 hides too much, so that float64 is compared in any case
SAME_WEIGHT = 1e-3  # relative difference of two weights in an average that are taken as equal
