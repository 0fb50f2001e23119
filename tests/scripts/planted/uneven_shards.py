# planted: EV109, line 11, seen by running only
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
full = TensorDataset(torch.randn(101, 6), torch.randn(101, 1))
part = Subset(full, range(rank, len(full), world_size))
loader = DataLoader(part, batch_size=10, shuffle=True)
model = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
