# clean
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--global-batch-size", type=int, default=512)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

dist.init_process_group(backend="gloo")
world_size = dist.get_world_size()
dataset = TensorDataset(torch.randn(4096, 10, generator=torch.Generator().manual_seed(9)), torch.randn(4096, 2, generator=torch.Generator().manual_seed(10)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.global_batch_size // world_size, sampler=sampler)
model = DistributedDataParallel(nn.Linear(10, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
