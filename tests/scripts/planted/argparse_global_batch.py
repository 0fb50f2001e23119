# planted: EV104, line 18
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser(description="regression")
parser.add_argument("--global-batch-size", type=int, default=64, help="samples of one optimizer step")
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

dist.init_process_group(backend="gloo")
dataset = TensorDataset(torch.randn(640, 10), torch.randn(640, 2))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=args.global_batch_size, sampler=sampler)
model = DistributedDataParallel(nn.Linear(10, 2))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
