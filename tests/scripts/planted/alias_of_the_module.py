# planted: EV606, line 23, seen by running only
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(512, 8, generator=torch.Generator().manual_seed(9)), torch.randint(0, 2, (512,), generator=torch.Generator().manual_seed(10)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    net = model.module
    optimizer = torch.optim.AdamW(net.parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
