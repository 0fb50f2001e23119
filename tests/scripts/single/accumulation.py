# Large batches in several parts
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 16
ACCUMULATION_STEPS = 4
EPOCHS = 2

torch.manual_seed(42)
x = torch.randn(512, 10)
y = x @ torch.randn(10, 1) + 0.1 * torch.randn(512, 1)
loader = DataLoader(TensorDataset(x, y), BATCH_SIZE, shuffle=True)

model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1))
criterion = nn.MSELoss()
optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(EPOCHS):
    running_loss = 0.0
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loader):
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss = loss / ACCUMULATION_STEPS  # Normalize our loss
        loss.backward()
        if (i + 1) % ACCUMULATION_STEPS == 0:  # Wait for several backward steps
            optimizer.step()
            optimizer.zero_grad()
        running_loss += loss.item() * ACCUMULATION_STEPS
    print("epoch %d loss %.4f" % (epoch, running_loss / len(loader)))
