"""Keeps replicas equal: on every rank, the applied gradient is that of the global mean loss.

Reading order, from the roof down; each imports only from those below it:

1. `wrapper/`: `DistributedDataParallel`, the class that users see, and its parts.
2. `data_parallel/`: `DataParallel`, replicas in the threads of one process. It stands by itself.
3. `sharded/`: gradients that are sharded over the ranks, for `ShardedOptimizer`.
4. `virtual_ranks/`: reproducible mode: a loop over virtual ranks, and the sums of their gradients.
5. `monitors/`: comparisons between ranks while a model trains: parameters, options, non-finite gradients.
6. `normalization/`: `SyncBatchNorm`, and the order of the exchanges of a model's layers.
7. `gradients/`: the engine. It follows backward passes, packs gradients into buckets and averages them over ranks.
8. `batches`: splitting a batch, and the dummy batch of a rank whose share is empty. `join`: ranks that run out of data
   before the others. `channels`: transports for one purpose each. `module_buffers`: running statistics and the like.

`tests/reference_engine.py` is a slow, obvious engine with which tests compare this one.
"""
