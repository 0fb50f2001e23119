"""Each sample's partner against all others of its batch: not the same on parts of a batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
views = TensorDataset(torch.randn(128, 16), torch.randn(128, 16))
loader = DataLoader(views, batch_size=32, shuffle=True)
encoder = nn.Linear(16, 8)
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)

for epoch in range(2):
    for first, second in loader:
        a = F.normalize(encoder(first), dim=1)
        b = F.normalize(encoder(second), dim=1)
        logits = a @ b.t() / 0.1
        labels = torch.arange(logits.size(0))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
