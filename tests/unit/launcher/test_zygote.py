"""How a forked rank becomes the launcher's child."""

from __future__ import annotations

import subprocess
import sys

JOIN = """
import os
from evenstep.launcher.spawn.zygote import _join
_join(launcher=2**22 + 1, between=2**22 + 2)  # nobody has such numbers: both have gone, another adopted it
"""


def test_a_rank_whose_launcher_has_gone_meanwhile_ends() -> None:
    """It would look for its launcher for ever."""
    assert subprocess.run([sys.executable, "-c", JOIN], timeout=60).returncode == 1
