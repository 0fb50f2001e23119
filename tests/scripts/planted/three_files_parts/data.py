import torch
from torch.utils.data import DataLoader, TensorDataset


def build_data():
    return TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))


def build_loader(train_set):
    return DataLoader(train_set, batch_size=32, shuffle=True)
