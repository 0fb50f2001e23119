"""torch's process groups (Gloo, NCCL) as transports.

Reading order:

- `transport`: `ProcessGroupTransport`, the collectives of one group behind `core.transport.Transport`, with errors that
  name call and rank.
- `gloo`: makes groups over Gloo between some ranks, without the other ranks' help.
- `full_duplex`: exchanges parts in both directions of a connection at once, unlike Gloo's own collectives.
"""
