"""Observers of a model: checks that compare ranks or inspect gradients, and optimizers that step in backward.

Reading order: `checks` has most of the checks, and builds a model's; `end_of_run` compares replicas once more at the
end. `steps` checks optimizers' steps, `first_batch` the samples that ranks train on. `digests` has the numbers by which
tensors are compared. `in_backward` steps optimizers.
"""
