# planted: EV404, line 14, seen by running only
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def evaluate(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
    model.train()
    return correct


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_set = TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(9)), torch.randint(0, 2, (256,), generator=torch.Generator().manual_seed(10)))
    test_set = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(11)), torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(12)))
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=32)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            print("correct:", evaluate(model, test_loader))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
