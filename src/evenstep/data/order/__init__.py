"""Which samples each rank loads in which step, the same for any number of ranks.

Read `batch_plan` first: an epoch is an order and its cuts into global batches, of which every rank takes a share.
Orders that are computed by position, and not stored: `permutation` (a shuffle) and `weighted` (draws with replacement);
`max_tokens` cuts an order by tokens instead of samples. `drawn` has what a sampler or batch sampler of the script
gives, and `epochs` who calls its `set_epoch`.
"""
