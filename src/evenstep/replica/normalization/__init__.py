"""Batch normalisation over the rows of all ranks.

Reading order: `sync_batchnorm` (the layer, the exchanges of a model's layers, and ranks that have left their loop),
`arithmetic` (statistics of one rank's rows, and of all ranks' rows).
"""
