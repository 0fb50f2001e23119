"""torch's pytrees (torch 2.11 and later): private by name, but documented, and used by functorch and dynamo.

A registered class, such as the model outputs of transformers, is a node; a dataclass isn't. The module
`ground.computing.pytrees` takes apart the containers that users define themselves, including dataclasses.
"""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
