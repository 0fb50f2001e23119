"""Which samples each rank loads in which step. Pure: computed and not stored, the same for any number of ranks.

Read `batch_plan` first: an epoch is an order and its cuts into global batches, of which every rank takes a share. The
orders are `permutation` (a shuffle computed by position) and `weighted` (draws with replacement); `max_tokens` cuts an order by
tokens instead of samples.
"""
