# clean
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def prepare(path, rank):
    if rank != 0:
        dist.barrier()
    if not os.path.exists(path):
        torch.save(torch.randn(128, 6), path) if rank == 0 else None
    if rank == 0:
        dist.barrier()
    return torch.load(path)


def share_name(rank):
    if rank == 0:
        box = ["run-1"]
        dist.broadcast_object_list(box, src=0)
    else:
        box = [None]
        dist.broadcast_object_list(box, src=0)
    return box[0]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    name = share_name(rank)
    dataset = TensorDataset(prepare(f"{name}.pt", rank))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DDP(torch.nn.Linear(6, 6))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            (model(x) - x).abs().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


main()
