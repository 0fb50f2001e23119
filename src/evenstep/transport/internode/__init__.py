"""Collectives between nodes of several ranks: shared memory inside each node, Gloo between them.

Reading order:

- `plan`: the node of each rank, and the chunks of a vector. Plain data and pure functions.
- `transport`: `InternodeTransport`, the transport itself: checks arguments and queues calls for its thread. Its
  docstring draws an all-reduce.
- `steps`: the actions of one rank in each call, in that thread; the first is a message of fixed length.
"""
