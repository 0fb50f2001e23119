"""Metric learning: the hardest triplets of a batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def batch_hard(z, labels, margin=0.5):
    distances = torch.cdist(z, z)
    same = labels[:, None] == labels[None, :]
    hardest_positive = (distances * same).amax(1)
    hardest_negative = distances.masked_fill(same, float("inf")).amin(1)
    return torch.relu(hardest_positive - hardest_negative + margin).mean()


def main():
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,)))
    loader = DataLoader(data, batch_size=32, shuffle=True)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for epoch in range(2):
        for x, labels in loader:
            loss = batch_hard(net(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
