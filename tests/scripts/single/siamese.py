"""Pairs of digits: the same, or not?"""
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger(__name__)


class Pairs(Dataset):
    def __init__(self, length=256):
        digits = load_digits()
        self.x = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.y = torch.tensor(digits.target)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        j = (i * 7 + 3) % self.length
        return (self.x[i], self.x[j]), (self.y[i] == self.y[j]).float()


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=1.0):
        super().__init__()
        self.margin = margin

    def forward(self, a, b, same):
        distance = F.pairwise_distance(a, b)
        loss = same * distance.pow(2) + (1 - same) * torch.clamp(self.margin - distance, min=0).pow(2)
        return loss.mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, a, b):
        return self.net(a), self.net(b)


def train(epochs=1):
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = Encoder().to(device)
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dataloader = DataLoader(Pairs(), batch_size=32, shuffle=True)
    for epoch in range(epochs):
        losses = []
        for (a, b), same in dataloader:
            a, b, same = a.to(device), b.to(device), same.to(device)
            left, right = model(a, b)
            loss = criterion(left, right, same)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        logger.info("epoch %d: %.4f", epoch, sum(losses) / len(losses))


if __name__ == '__main__':
    torch.manual_seed(0)
    train()
