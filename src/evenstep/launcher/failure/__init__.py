"""Which rank failed first, and why.

Reading order: `report` (a `Failure`, the text that is printed, when the root cause is known, how long the other ranks
may take), `hangs` (which rank keeps the others waiting), `stacks` (where a rank is), `detection` (suspended and overdue
ranks, seen from outside). All decisions are pure.
"""
