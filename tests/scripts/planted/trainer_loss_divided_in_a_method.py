# planted: EV502, line 28, seen by running only
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Trainer:
    def __init__(self, model, loader, sampler):
        self.model, self.loader, self.sampler = model, loader, sampler
        self.world_size = dist.get_world_size()
        self.optimizer = torch.optim.AdamW(model.parameters())

    def compute_loss(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        return loss / self.world_size

    def train(self):
        for epoch in range(3):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = self.compute_loss(x, y)
                loss.backward()
                self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    train_set = TensorDataset(torch.randn(512, 8, generator=torch.Generator().manual_seed(9)), torch.randint(0, 2, (512,), generator=torch.Generator().manual_seed(10)))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    Trainer(DDP(nn.Linear(8, 2)), loader, sampler).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
