"""For tests of code that runs on several ranks. Public; nothing inside evenstep imports it."""

from evenstep.testing.pool import RankPool

__all__ = ["RankPool"]
