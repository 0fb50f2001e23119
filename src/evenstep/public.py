"""The public names, each from the file that has it; importing them registers the backend."""

from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.data.loader import DataLoader
from evenstep.data.sampler import DistributedSampler
from evenstep.data.sources.tokens import TokenDataset
from evenstep.errors import EvenstepError
from evenstep.joining import init
from evenstep.launcher.launch import launch
from evenstep.logger.logger import Logger
from evenstep.optim.clipping import clip_grad_norm_, clip_grad_value_
from evenstep.optim.ema import ExponentialMovingAverage
from evenstep.optim.learning_rate import scale_learning_rate
from evenstep.optim.local_sgd.local_sgd import LocalSGD
from evenstep.optim.sharded.sharded_optimizer import ShardedOptimizer
from evenstep.parallel.parallelize import attach, parallelize
from evenstep.parameter_servers.api import parameter_server
from evenstep.parameter_servers.embedding.remote_embedding import RemoteEmbedding
from evenstep.replica.data_parallel.wrapper import DataParallel
from evenstep.replica.normalization.sync_batchnorm import SyncBatchNorm
from evenstep.replica.wrapper.distributed import DistributedDataParallel, backward
from evenstep.transport.backend.backend import register_backend
from evenstep.world import World

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

register_backend()  # for torch.distributed.init_process_group("evenstep")
