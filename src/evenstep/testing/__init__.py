"""Help for tests of code that runs on several ranks. Public; nothing inside evenstep imports it.

- `pool`: `RankPool`, rank processes that stay alive between tests.
- `faults`: faults on request, at a rank, step and phase.
- `storage`: a conformance suite for storages, including your own.
"""

from evenstep.testing.pool import RankPool

__all__ = ["RankPool"]
