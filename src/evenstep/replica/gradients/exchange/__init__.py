"""What happens to the gradients of a window.

Reading order: `base` (the interface, which is also the exchange of one rank), `all_reduce` (buckets travel while the
backward pass runs), `header` (the few numbers that follow them), `weights` (the scale and the sum of loss weights),
`sparse` (gradients of embeddings).
"""
