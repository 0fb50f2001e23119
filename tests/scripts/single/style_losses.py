"""A loss of several layers that is added up; time comes first in batches; a table of confusions."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)


def time_first(samples):
    x, y = zip(*samples)
    return torch.stack(x, 1), torch.stack(y)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.tanh(self.first(x.mean(0)))
        return [hidden, self.second(hidden)]


def layer_loss(features, target):
    return F.mse_loss(features.mean(1), target)


train_set = TensorDataset(torch.randn(75, 5, 4), torch.randint(0, 2, (75,)))
test_set = TensorDataset(torch.randn(30, 5, 4), torch.randint(0, 2, (30,)))
train_loader = DataLoader(train_set, batch_size=20, shuffle=True, collate_fn=time_first)
test_loader = DataLoader(test_set, batch_size=10, collate_fn=time_first)
model = Layers()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(2):
    for step, (x, y) in enumerate(train_loader):
        outputs = model(x)
        style = 0.0
        for features in outputs:
            style += 0.1 * layer_loss(features, y.float())
        loss = F.cross_entropy(outputs[-1], y) + style
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"{step * len(y)}/{len(train_set)} style {style.item():.4f} loss {loss.item():.4f}")

    table = torch.zeros(2, 2)
    with torch.no_grad():
        for x, y in test_loader:
            for found, right in zip(model(x)[-1].argmax(1), y):
                table[right, found] += 1
    print(table.tolist())
