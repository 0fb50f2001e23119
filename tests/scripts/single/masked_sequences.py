"""A look at a batch before the loop; batches are dictionaries, and a mask leaves padding out of the mean."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self, n=70, steps=6):
        self.x = torch.randn(n, steps, 3)
        self.y = self.x.sum(-1)
        self.mask = (torch.arange(steps) < torch.randint(1, steps + 1, (n, 1))).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i], "mask": self.mask[i]}


torch.manual_seed(4)
loader = DataLoader(Sequences(), batch_size=16, shuffle=True)
shown = next(iter(loader))
print("first lengths", [int(shown["mask"][k].sum()) for k in range(16)])

model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    total, count = 0.0, 0
    for batch in loader:
        error = (model(batch["x"]).squeeze(-1) - batch["y"]) ** 2 * batch["mask"]
        loss = error.sum() / batch["mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += error.sum().item()
        count += batch["mask"].sum().item()
    print(f"epoch {epoch}: {total / count:.4f}")
