import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_data():
    return TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))


def build_loader(train_set):
    sampler = DistributedSampler(train_set)
    return DataLoader(train_set, batch_size=32, sampler=sampler), sampler
