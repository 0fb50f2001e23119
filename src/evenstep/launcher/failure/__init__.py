"""Finds which rank failed first, and why, and decides how the launcher reacts.

Reading order: `verdict` (the table: whether an attempt goes on, is stopped, or has ended), `report` (a `Failure`, and
its text; how long the other ranks may take), `hangs` (which rank keeps the others waiting), `stacks` (where a rank is),
`detection` (`RankState`: the state of a rank; suspended and overdue ranks). All decisions are pure.
"""
