# planted: EV603, line 10
import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

torch.cuda.set_device(args.local_rank)
dist.init_process_group(backend="nccl")
dataset = TensorDataset(torch.randn(512, 4), torch.randint(2, (512,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler, pin_memory=True)
model = DDP(torch.nn.Linear(4, 2).cuda(), device_ids=[args.local_rank])
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x = x.cuda(args.local_rank, non_blocking=True)
        y = y.cuda(args.local_rank, non_blocking=True)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
