# planted: EV105, line 54
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    def synchronize(self):
        both = torch.tensor([self.total, self.count])
        dist.all_reduce(both)
        self.total, self.count = both.tolist()


class Meters:
    def __init__(self):
        self.meters = {}

    def update(self, n, **values):
        for name, value in values.items():
            self.meters.setdefault(name, Meter()).update(value, n)

    def synchronize(self):
        for meter in self.meters.values():
            meter.synchronize()


def evaluate(model, loader):
    meters = Meters()
    with torch.no_grad():
        for x, y in loader:
            meters.update(len(y), accuracy=(model(x).argmax(1) == y).float().mean().item())
    meters.synchronize()
    return meters.meters["accuracy"]


def main():
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(512, 8, generator=torch.Generator().manual_seed(9)), torch.randint(0, 2, (512,), generator=torch.Generator().manual_seed(10)))
    val_set = TensorDataset(torch.randn(65, 8, generator=torch.Generator().manual_seed(11)), torch.randint(0, 2, (65,), generator=torch.Generator().manual_seed(12)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, batch_size=16, sampler=val_sampler)
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, val_loader)
        if dist.get_rank() == 0:
            print(epoch, accuracy.total / accuracy.count)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
