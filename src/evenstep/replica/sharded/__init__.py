"""Gradients that are sharded over the ranks: each rank has the sum of its shard.

Reading order: `exchange` (reduce-scatters buckets), `bucket` (the memory of a sharded bucket), `slices` (which part of
which parameter is in a shard; pure), `values` (the parameters, which are gathered), `gradient_placeholder` (is in
`p.grad` in place of a sharded gradient).
"""
