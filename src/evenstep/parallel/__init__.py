"""Models that are divided over ranks: torch's FSDP2 and tensor parallelism with the training loop of replicated models.

torch divides the model and exchanges its parts. This package adds the engine of `replica`: windows, weights, empty
shares and checks.

Reading order:

- `parallelize`: the functions that users call.
- `model`: the class that they return.
- `exchange`: the end of a window: gradients that FSDP2 has added over ranks are divided once; other gradients are added
  first.
- `replicas`: finds ranks with the same parts of the model.
- `layout`: checks over which ranks each parameter is divided.
- `blocks`: chooses modules that are sharded by themselves, and checks that a tensor plan fits the model. Pure.
- `optimizers`: finds optimizers that were made before the model was divided.
"""
