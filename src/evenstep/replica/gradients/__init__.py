"""The engine: from gradients that autograd produces to the global mean in `p.grad`.

Reading order, the way of a gradient:

1. `engine` follows backward passes and accumulation windows, and calls the others.
2. `autograd_hooks`: when a pass reaches the outputs, and when a bucket has all its gradients.
3. `exchange/`: what happens to the gradients of a window: the interface, and the all-reduce of several ranks.
4. `division`: by what gradients are divided, and where. `strategies`: how windows end. `observer`: the interface of
   what watches steps. `window`: how each pass counts.
5. `buckets/`: which gradient lies where, a bucket's memory, and the order in which buckets are launched.
"""
