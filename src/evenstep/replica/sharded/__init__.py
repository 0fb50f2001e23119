"""Gradients that are sharded over the ranks: each rank has the sum of its shard.

Reading order: `exchange` (reduce-scatters buckets), `bucket` (what lies where in a sharded bucket), `slices` (which
part of which parameter lies in a shard; pure), `values` (the parameters, which are gathered), `gradient_placeholder`
(stands in `p.grad` for a gradient that this rank doesn't have).
"""
