# clean
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Trainer:
    def __init__(self, model, loader, val_loader, sampler):
        self.model, self.loader, self.val_loader, self.sampler = model, loader, val_loader, sampler
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=2)

    @torch.no_grad()
    def validate(self):
        losses = [F.cross_entropy(self.model(x), y).item() for x, y in self.val_loader]
        return sum(losses) / len(losses)

    def train(self):
        for epoch in range(20):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = F.cross_entropy(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            val_loss = torch.tensor(self.validate())
            dist.all_reduce(val_loss)
            self.scheduler.step(val_loss / dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    train_set = TensorDataset(torch.randn(512, 8, generator=torch.Generator().manual_seed(9)), torch.randint(0, 2, (512,), generator=torch.Generator().manual_seed(10)))
    val_set = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(11)), torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(12)))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))
    Trainer(DDP(nn.Linear(8, 2)), loader, val_loader, sampler).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
