"""Which rank failed first, and why; and how the launcher reacts.

Reading order: `verdict` (the table: whether an attempt goes on, is stopped, or has ended), `report` (a `Failure`, the
text that is printed, when the root cause is known, how long the other ranks may take), `hangs` (which rank keeps the
others waiting), `stacks` (where a rank is), `detection` (`RankState`: the state of a rank; suspended and overdue
ranks). All decisions are pure.
"""
