"""A Trainer with fit, hooks and a context of its own for each rank."""

import dataclasses
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclasses.dataclass
class Context:
    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self):
        return self.rank == 0

    @classmethod
    def from_env(cls):
        return cls(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))


class Trainer:
    def __init__(self, context, model, optimizer, loss_fn):
        self.context = context
        self.model = DDP(model)
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.history = []

    def log(self, text):
        if self.context.is_main:
            print(text)

    def fit(self, loader, val_loader, num_epochs):
        for epoch in range(num_epochs):
            loader.sampler.set_epoch(epoch)
            self.model.train()
            for batch in loader:
                self.training_step(batch)
            accuracy = self.validate(val_loader)
            self.history.append(accuracy)
            self.log(f"epoch {epoch}: {accuracy:.3f}")
            self.save(epoch)

    def training_step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        self.loss_fn(self.model(x), y).backward()
        self.optimizer.step()

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        counts = torch.zeros(2)
        for x, y in loader:
            counts += torch.tensor([(self.model.module(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    def save(self, epoch):
        if not self.context.is_main:
            return
        state = {"model": self.model.module.state_dict(), "epoch": epoch}
        torch.save(state, f"epoch{epoch}.pt")


def main():
    dist.init_process_group("gloo")
    context = Context.from_env()
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(640, 12), torch.randint(3, (640,)))
    train_part, val_part = torch.utils.data.random_split(data, [512, 128])
    loader = DataLoader(train_part, batch_size=16, sampler=DistributedSampler(train_part))
    mine = torch.utils.data.Subset(val_part, range(context.rank, len(val_part), context.world_size))
    val_loader = DataLoader(mine, batch_size=16)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters())
    Trainer(context, model, optimizer, nn.CrossEntropyLoss()).fit(loader, val_loader, 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
