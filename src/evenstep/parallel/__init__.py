"""Models that are divided over ranks: torch's FSDP2 and tensor parallelism under the loop of replicated ones.

torch divides the model and moves its parts; what is added here is how a step counts: the windows, weights, empty
shares and checks of `replica`, whose engine it is.

Reading order:

- `parallelize`: the functions that users call.
- `model`: the class that comes back.
- `exchange`: how a window ends: what FSDP2 has added over ranks is divided once; what it doesn't manage is added.
- `drift`: replicas of the same parts that differ.
- `watch`: gradients that aren't finite.
- `layout`: which parameter is divided over which ranks, and by whom it is added.
- `blocks`: which modules are sharded by themselves, and whether a tensor plan fits. Pure.
- `optimizers`: an optimizer that was made too early.
"""
