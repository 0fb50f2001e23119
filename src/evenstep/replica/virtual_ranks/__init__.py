"""Reproducible mode: the same bits on any number of ranks.

Reading order: `loop` (over the virtual ranks of a batch, with their random streams and module buffers), `sums` (adds
their gradients in the lower part of a fixed binary tree).
"""
