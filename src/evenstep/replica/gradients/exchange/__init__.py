"""The exchange of a window's gradients.

Reading order: `base` (the interface, which is also the exchange of one rank), `all_reduce` (buckets travel while the
backward pass runs), `across_ranks` (base class of exchanges over several ranks), `header` (the few numbers that follow
the gradients), `weights` (the scale and the sum of loss weights), `sparse` (gradients of embeddings).
"""
