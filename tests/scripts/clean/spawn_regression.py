"""mp.spawn with a port that is asked for, a writer on rank 0 and early stopping that all ranks agree on."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter


def free_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def worker(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    x = torch.randn(2000, 6)
    train_set = TensorDataset(x[:1600], x[:1600].square().sum(1, keepdim=True))
    mine = slice(1600 + rank * 400 // world_size, 1600 + (rank + 1) * 400 // world_size)
    x_val, y_val = x[mine], x[mine].square().sum(1, keepdim=True)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    loader = DataLoader(train_set, batch_size=40, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    writer = SummaryWriter("runs/regression") if rank == 0 else None
    best, bad = float("inf"), 0
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = nn.functional.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            val = nn.functional.mse_loss(model.module(x_val), y_val, reduction="sum")
        dist.all_reduce(val)
        if writer is not None:
            writer.add_scalar("val", val.item() / 400, epoch)
        bad = 0 if val < best else bad + 1
        best = min(best, val.item())
        if bad == 5:
            break
    if writer is not None:
        writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2, free_port()), nprocs=2)
