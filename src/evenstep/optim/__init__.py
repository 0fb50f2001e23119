"""The step: flat and sharded optimizers, clipping, learning-rate rules, averages of parameters."""
