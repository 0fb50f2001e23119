"""Observers of a model: checks that compare ranks or inspect gradients, and what steps optimizers in backward.

Reading order: `checks` has most of the checks, and builds those of a model; `end_of_run` compares replicas once more.
`steps` looks at optimizers' steps, `first_batch` at what ranks train on. `digests` are the numbers by which tensors are
compared. `in_backward` steps optimizers.
"""
