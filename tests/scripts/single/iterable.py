"""A stream of records."""
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Waves(IterableDataset):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def __iter__(self):
        for i in range(self.n):
            t = torch.linspace(0, 1, 16) * (1 + i % 7)
            yield torch.sin(t), torch.tensor([(i % 7) / 7.0])


torch.manual_seed(0)
stream = Waves(320)
loader = DataLoader(stream, batch_size=32)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_fn = nn.MSELoss()

total, count = 0.0, 0
for epoch in range(1):
    for wave, frequency in loader:
        prediction = model(wave)
        loss = loss_fn(prediction, frequency)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        count += 1
print("mean loss", total / count)
