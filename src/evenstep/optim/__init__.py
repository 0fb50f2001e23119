"""The step: optimizers over whole and sharded gradients, clipping, learning rates, averages of parameters.

Reading order, from the roof down; each imports only from those below it:

1. `local_sgd/`: ranks that step independently.
2. `sharded/`: `ShardedOptimizer`, whose state and work are sharded over the ranks.
3. `clipping`: by the norm of the whole gradient, also if it is sharded. `ema`: running averages of parameters.
   `learning_rate`: the rate for a larger batch.
4. `arguments` and `consistency`: the arguments of optimizers and steps; a difference between ranks is an error on all
   ranks.
5. `loading`: loads an optimizer's state with its exact bits. `exact`: sums that don't depend on the order, for
   reproducible norms. `kinds`: properties of torch's optimizers.
"""
