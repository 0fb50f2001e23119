"""Few-shot classification: distances between embeddings and prototypes that the model learns."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(11)


class Prototypes(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.prototypes = nn.Parameter(torch.randn(num_classes, 4))

    def forward(self, x):
        return -torch.cdist(self.embed(x), self.prototypes)


train_set = TensorDataset(torch.randn(110, 6), torch.randint(0, 3, (110,)))
loader = DataLoader(train_set, batch_size=24, shuffle=True)
model = Prototypes(3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(2):
    total, right = 0.0, 0
    for x, y in loader:
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        right += (scores.argmax(1) == y).sum().item()
    print(f"epoch {epoch}: loss {total / len(train_set):.4f}, {right} right")
