"""Meters that are added over ranks; the learning rate is set by hand."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        both = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(both)
        self.sum, self.count = both.tolist()

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def adjust_learning_rate(optimizer, epoch, args):
    for group in optimizer.param_groups:
        group["lr"] = args.lr * dist.get_world_size() * 0.1 ** (epoch // 30)


def train(loader, model, criterion, optimizer):
    losses = AverageMeter("loss")
    model.train()
    for step, (images, target) in enumerate(loader):
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            losses.update(loss.item(), images.size(0))
    losses.all_reduce()
    return losses.avg


def validate(loader, model):
    top1 = AverageMeter("acc")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            top1.update((model(images).argmax(1) == target).float().mean().item(), images.size(0))
    top1.all_reduce()
    return top1.avg


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    train_set = TensorDataset(torch.randn(800, 3, 8, 8), torch.randint(10, (800,)))
    val_set = TensorDataset(torch.randn(200, 3, 8, 8), torch.randint(10, (200,)))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, num_workers=args.workers)
    indices = list(range(rank, len(val_set), dist.get_world_size()))
    val_loader = DataLoader(torch.utils.data.Subset(val_set, indices), batch_size=32)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    optimizer = torch.optim.SGD(model.parameters(), args.lr * dist.get_world_size(), momentum=0.9)
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        adjust_learning_rate(optimizer, epoch, args)
        loss = train(loader, model, nn.CrossEntropyLoss(), optimizer)
        acc = validate(val_loader, model)
        is_best = acc > best
        best = max(acc, best)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.3f} acc {acc:.3f}")
            if is_best:
                torch.save({"epoch": epoch + 1, "state_dict": model.module.state_dict()}, "best.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
