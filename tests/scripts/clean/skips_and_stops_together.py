import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def evaluate(model, loader):
    total = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            total += torch.stack([F.cross_entropy(model(x), y, reduction="sum"), torch.tensor(float(len(y)))])
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def mean_of_ranks(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()


def evaluate_own_part(model, loader):
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), y).item() for x, y in loader]
    return sum(losses) / len(losses)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 8), torch.randint(0, 2, (512,)))
    train_set, val_set = random_split(data, [448, 64])
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=16, sampler=val_sampler)
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    best, patience = float("inf"), 0
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            bad = torch.isnan(loss).float()
            dist.all_reduce(bad)
            if bad.item() > 0:
                continue
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not torch.isfinite(norm):
                continue
            optimizer.step()
        val_loss = evaluate(model, val_loader)
        if val_loss < best:
            best, patience = val_loss, 0
        else:
            patience += 1
        if patience > 3:
            break
        own_loss = evaluate_own_part(model, val_loader)
        if mean_of_ranks(own_loss) < 0.01:
            break
        flag = torch.tensor(float(own_loss > 10.0))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item() > 0:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
