"""A script as LibCST reads it; see `tools/reading/tree.py`."""

from __future__ import annotations

from evenstep.tools.reading.tree import File as Script
from evenstep.tools.reading.tree import Node, Statement, dotted, target_names

__all__ = ["Node", "Script", "Statement", "dotted", "target_names"]
