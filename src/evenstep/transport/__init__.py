"""Moves tensors between ranks: one interface (`core.transport.Transport`) and its implementations.

Read `base` (what a call is) and `core.transport`, then follow an all-reduce of CPU ranks of one node through `shm`,
whose docstring has the steps. The rest by its place in the order of imports, from the roof down:

1. `backend/`: the `torch.distributed` backend "evenstep", by which any torch program uses these transports.
2. `factory`: which transports a world gets, and how ranks that share a node find each other.
3. `tree_order`: sums in a fixed order over transports that add in an order of their own.
4. `internode/`: CPU ranks of several nodes, by shared memory inside each and Gloo between them.
5. `process_group/`: Gloo and NCCL, as torch has them.
6. `shm/`: CPU ranks of one node, through memory that they share.
7. `local`: a world of one.
8. `core/`: what several transports use, such as headers, the checks of arguments, and the arithmetic of reductions.
9. `base`: a call, as plain data.

To add a collective, see "Where to add something" in docs/contributing/architecture.md.
"""

from evenstep.transport.core.fallback import fallback

__all__ = ["fallback"]
