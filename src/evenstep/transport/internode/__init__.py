"""Collectives between nodes of several ranks: shared memory inside each node, Gloo between them.

Reading order:

- `plan`: which rank is on which node, and how a vector is cut. Plain data and pure functions.
- `transport`: `InternodeTransport`, the transport itself: checks arguments and queues calls for its thread. The way of
  an all-reduce is drawn at its top.
- `steps`: what one rank does in each call, step by step, in that thread; first a message of fixed length.
"""
