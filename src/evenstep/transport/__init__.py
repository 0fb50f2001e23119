"""Moves tensors between ranks: one interface (`core.transport.Transport`) and its implementations.

Read `base` (a call as plain data) and `core.transport`, then follow an all-reduce of CPU ranks of one node through
`shm`; its docstring lists the steps. All modules in the order of imports, from the roof down:

1. `backend/`: the `torch.distributed` backend "evenstep", with which any torch program can use these transports.
2. `factory`: chooses a world's transports, and lets ranks that share a node find each other.
3. `tree_order`: sums in a fixed order, over transports that add in their own order.
4. `internode/`: CPU ranks of several nodes, through shared memory inside each node and Gloo between nodes.
5. `process_group/`: torch's Gloo and NCCL.
6. `shm/`: CPU ranks of one node, through shared memory.
7. `local`: a world of one.
8. `core/`: code that several transports use, such as call headers, checks of arguments, and the arithmetic of
   reductions.
9. `base`: a call, as plain data.

To add a collective, see "Where to add something" in docs/contributing/architecture.md.
"""

from evenstep.transport.core.fallback import fallback

__all__ = ["fallback"]
