"""Observers of a model: checks that compare ranks or inspect gradients, and what steps optimizers in backward.

Reading order: `checks` has the checks, and builds those of a model. `digests` are the numbers by which tensors are
compared. `in_backward` steps optimizers.
"""
