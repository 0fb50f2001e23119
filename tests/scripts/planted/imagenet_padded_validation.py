# planted: EV105, line 26
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim
import torch.utils.data
from torch.utils.data import TensorDataset


def main():
    parser = argparse.ArgumentParser(description="classifier")
    parser.add_argument("-b", "--batch-size", default=16, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train_dataset = TensorDataset(torch.randn(333, 32, generator=torch.Generator().manual_seed(24)), torch.randint(10, (333,), generator=torch.Generator().manual_seed(25)))
    val_dataset = TensorDataset(torch.randn(101, 32, generator=torch.Generator().manual_seed(25)), torch.randint(10, (101,), generator=torch.Generator().manual_seed(26)))
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset, shuffle=False)
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=args.batch_size, sampler=val_sampler)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer)
        acc1 = validate(val_loader, model)
        if rank == 0:
            print("epoch", epoch, "acc@1", acc1)
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer):
    model.train()
    for images, target in train_loader:
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(val_loader, model):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, target in val_loader:
            counts[0] += (model(images).argmax(1) == target).sum()
            counts[1] += target.numel()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    main()
