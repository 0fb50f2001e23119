# clean
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def free_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def worker(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dataset = TensorDataset(torch.randn(256, 20, generator=torch.Generator().manual_seed(23)), torch.randn(256, 1, generator=torch.Generator().manual_seed(24)))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DDP(torch.nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for source, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(source), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    for attempt in range(1):
        print("starting two ranks")
        mp.spawn(worker, args=(2, free_port()), nprocs=2)
