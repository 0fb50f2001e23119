"""Gradients that are sharded over the ranks: each rank has the sum of its shard.

Reading order: `exchange` (reduce-scatters buckets and gathers parameters), `bucket` (what lies where in a sharded
bucket), `gradient_placeholder` (stands in `p.grad` for a gradient that this rank doesn't have).
"""
