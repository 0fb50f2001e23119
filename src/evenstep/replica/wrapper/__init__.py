"""The class that users see, and its parts.

Reading order:

1. `distributed`: `DistributedDataParallel`: forward, backward, micro-batches, and torch's interface.
2. `assembly`: builds the engine of a wrapped module: its exchange, its monitors, and the way its windows end.
3. `model_check`: checks that the model is the same on every rank, and suits reproducible mode.
4. `settings`: torch's constructor arguments, checked and translated into the engine's terms.
5. `reducer`: the methods of torch's reducer that other programs call.
"""
