"""For tests of code that runs on several ranks. Public; nothing inside evenstep imports it.

- `pool`: `RankPool`, rank processes that stay alive between tests.
- `faults`: faults on request, at a rank, step and phase.
- `transport`, `storage`: conformance suites for transports and storages, also for your own.
- `reference`: the slow, obvious engine that the tests compare the fast one with.
"""

from evenstep.testing.pool import RankPool

__all__ = ["RankPool"]
