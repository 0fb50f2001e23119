"""Fresh random inputs here too."""

from tests.procs.conftest import fresh_seed

__all__ = ["fresh_seed"]
