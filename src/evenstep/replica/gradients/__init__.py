"""The engine: from gradients that autograd produces to the global mean in `p.grad`.

Reading order, the way of a gradient:

1. `engine` follows backward passes and accumulation windows, and calls the others.
2. `autograd_hooks`: reports when a pass reaches the outputs, and when a bucket has all its gradients.
3. `exchange/`: the exchange of a window's gradients: the interface, and the all-reduce over several ranks.
4. `division`: the divisor of gradients, and where it is applied. `strategies`: how windows end. `observer`: the
   interface of the checks that watch steps. `window`: how each pass counts.
5. `buckets/`: the layout of gradients in buckets, a bucket's memory, and the order in which buckets are launched.
"""
