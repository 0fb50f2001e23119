"""The optimizer whose state and work are sharded over the ranks (ZeRO, stages 1 and 2).

Reading order: `sharded_optimizer` (the class that users see: torch's interface to a partition), `element_wise` and
`per_parameter` (the two partitions: at any element, or at parameter boundaries), `flat_segments` (the tensors that the
inner optimizer steps, and a rank's shard of a tensor, as checkpoints store it).
"""
