"""Decides which samples each rank loads in which step; global batches are the same for any number of ranks.

Read `batch_plan` first: an epoch is an order, cut into global batches. Every rank takes a share of each. Orders that
are computed by position, and not stored: `permutation` (a shuffle), `weighted` (draws with replacement). `drawn` takes
the order from a sampler or batch sampler: the script's, or that of `max_tokens`, which cuts by tokens instead of
samples. `epochs` handles calls of `set_epoch`.
"""
