"""What N ranks would say N times on one terminal is said by rank 0 alone: logged lines and warnings, not errors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable


def quieten() -> Callable[[], None]:
    """Have this process log nothing below ERROR and show no warnings. Returns what takes it back.

    For ranks other than 0 that share a terminal. What a library logs at ERROR concerns this rank, and is shown.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    filters = warnings.filters[:]
    warnings.simplefilter("ignore")
    mine = warnings.filters[0]

    def restore() -> None:
        logging.disable(before)
        if mine not in filters and mine in warnings.filters:
            warnings.filters.remove(mine)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]

    return restore
