"""Batch normalisation over the rows of all ranks.

Reading order: `layers` (all layers of a model: the order of their exchanges, and ranks that have left their loop),
`sync_batchnorm` (one layer: what it exchanges, forward and backward).
"""
