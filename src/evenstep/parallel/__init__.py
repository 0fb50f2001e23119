"""Models that are divided over ranks: torch's FSDP2 and tensor parallelism with the training loop of replicated models.

torch divides the model and exchanges its parts. This package adds the engine of `replica`: windows, weights, empty
shares and checks.

Reading order:

- `parallelize`: the functions that users call.
- `model`: the class that they return.
- `exchange`: how a window ends: gradients that FSDP2 has added over ranks are divided once; the others are added first.
- `replicas`: which ranks have the same parts of the model.
- `layout`: which parameter is divided over which ranks.
- `blocks`: which modules are sharded by themselves, and whether a tensor plan fits the model. Pure.
- `optimizers`: finds optimizers that were made before the model was divided.
"""
