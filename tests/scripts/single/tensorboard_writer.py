"""Curves for TensorBoard, if it is installed."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

torch.manual_seed(5)
writer = SummaryWriter("runs") if SummaryWriter is not None else None
train_set = TensorDataset(torch.randn(256, 12), torch.randn(256, 2))
train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 2))
criterion = nn.SmoothL1Loss()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)

global_step = 0
for epoch in range(2):
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        if writer is not None:
            writer.add_scalar("train/loss", loss.item(), global_step)
            writer.add_scalar("train/lr", optimizer.param_groups[0]["lr"], global_step)
        global_step += 1
    if writer: writer.flush()

if writer is not None:
    writer.close()
