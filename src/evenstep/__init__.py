"""Data-parallel training for PyTorch in which every replica takes the same step."""

from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.data.loader import DataLoader
from evenstep.data.records import Records
from evenstep.data.sampler import DistributedSampler
from evenstep.data.tokens import TokenDataset
from evenstep.data.weighted import WeightedSampler
from evenstep.errors import EvenstepError
from evenstep.joining import init
from evenstep.launcher.launch import launch
from evenstep.logger.logger import Logger
from evenstep.optim.average import ExponentialAverage
from evenstep.optim.clipping import clip_grad_norm_, clip_grad_value_
from evenstep.optim.flat import fuse
from evenstep.optim.learning_rate import LinearWarmup, scale_learning_rate
from evenstep.optim.local_updates import LocalUpdates
from evenstep.optim.sharded import ShardedOptimizer
from evenstep.replica.data_parallel import DataParallel
from evenstep.replica.distributed import DistributedDataParallel
from evenstep.replica.sync_batchnorm import SyncBatchNorm
from evenstep.transport.backend import register_backend
from evenstep.world import World

__all__ = [
    "Checkpointer",
    "DataLoader",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "EvenstepError",
    "ExponentialAverage",
    "LinearWarmup",
    "LocalUpdates",
    "Logger",
    "Records",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "TokenDataset",
    "WeightedSampler",
    "World",
    "clip_grad_norm_",
    "clip_grad_value_",
    "fuse",
    "init",
    "launch",
    "scale_learning_rate",
]
__version__ = "0.1.0"

register_backend()  # for torch.distributed.init_process_group("evenstep")
