"""The step: optimizers over whole and sharded gradients, clipping, learning rates, averages of parameters.

Reading order, from the roof down; each imports only from those below it:

1. `local_sgd/`: ranks that step on their own.
2. `sharded/`: `ShardedOptimizer`, whose state and work are sharded over the ranks.
3. `clipping`: by the norm of the whole gradient, wherever its shards are. `ema`: running averages of parameters.
   `learning_rate`: the rate for a larger batch.
4. `arguments` and `consistency`: what each rank is given for an optimizer and for a step; a difference between ranks is
   an error on all of them.
5. `loading`: an optimizer's state is loaded with the bits that it had. `exact`: sums without an order, for reproducible
   norms. `kinds`: what is known of torch's optimizers.
"""
