"""Gradients that are sharded over the ranks: each rank has the sum over ranks of its shard.

Reading order: `exchange` (reduce-scatters buckets), `bucket` (the memory of a sharded bucket), `slices` (the parts of
parameters in a shard; pure), `values` (the parameters, which are gathered), `gradient_placeholder` (the tensor in
`p.grad` instead of a sharded gradient).
"""
