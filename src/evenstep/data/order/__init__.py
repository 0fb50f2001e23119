"""Which samples each rank loads in which step, the same for any number of ranks.

Read `batch_plan` first: an epoch is an order and its cuts into global batches, of which every rank takes a share.
Orders that are computed by position, and not stored: `permutation` (a shuffle), `weighted` (draws with replacement).
`drawn` has what a sampler or batch sampler gives: the script's, or that of `max_tokens`, which cuts by tokens, not by
samples. `epochs` has who calls its `set_epoch`.
"""
