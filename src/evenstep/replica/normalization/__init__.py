"""Batch normalisation over the rows of all ranks.

Reading order: `sync_batchnorm` (the layer; what the layers of a model exchange, and ranks that have left their loop),
`arithmetic` (statistics of rows, of one rank and of all).
"""
