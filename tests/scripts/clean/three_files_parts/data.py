import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_data():
    return TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(9)), torch.randint(0, 2, (256,), generator=torch.Generator().manual_seed(10)))


def build_loader(train_set):
    sampler = DistributedSampler(train_set)
    return DataLoader(train_set, batch_size=32, sampler=sampler), sampler
