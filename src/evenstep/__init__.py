"""Data-parallel training for PyTorch in which every replica takes the same step."""

import sys

__all__ = [
    "Checkpointer",
    "DataLoader",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "EvenstepError",
    "ExponentialMovingAverage",
    "LocalSGD",
    "Logger",
    "RemoteEmbedding",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "TokenDataset",
    "World",
    "attach",
    "backward",
    "clip_grad_norm_",
    "clip_grad_value_",
    "init",
    "launch",
    "parallelize",
    "parameter_server",
    "scale_learning_rate",
]
__version__ = "0.1.0"

if "evenstep_command" in sys.modules:  # the command `evenstep`: `doctor --no-run` needs no torch

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'evenstep' has no attribute {name!r}")
        from evenstep import public

        return getattr(public, name)

else:
    from evenstep.public import *  # noqa: F403
