"""Torch's pytrees (torch 2.11 and later): private by name, documented, and used by functorch and dynamo.

A class that is registered there, as the model outputs of transformers are, is a node; a dataclass isn't. The module
`pytrees` takes apart the containers that users make themselves, dataclasses too.
"""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
