import torch
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1100, 16, generator=generator)
    return TensorDataset(x, (x[:, :5].argmax(1)))


def make_loaders(rank, world_size, batch_size):
    data = make_data()
    train_set, val_set = Subset(data, range(1000)), Subset(data, range(1000, 1100))
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    mine = Subset(val_set, range(rank, len(val_set), world_size))
    return train_loader, DataLoader(mine, batch_size=batch_size)
