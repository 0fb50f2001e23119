import logging

import torch.distributed as dist

logger = logging.getLogger(__name__)


def setup():
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.ERROR)
    return dist.get_rank(), dist.get_world_size()


def info(text):
    logger.info(text)
