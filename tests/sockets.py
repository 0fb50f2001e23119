"""What a process listens on."""

from __future__ import annotations

import psutil


def listening() -> set[tuple[str, int]]:
    """The addresses on which this process listens."""
    return {tuple(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
