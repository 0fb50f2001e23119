"""Fresh random inputs for every run of the tests, as in `tests/procs`."""

from tests.procs.conftest import fresh_seed

__all__ = ["fresh_seed"]
