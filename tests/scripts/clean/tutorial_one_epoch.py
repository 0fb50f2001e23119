# clean
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# One pass over the data: there is no second order to be shuffled.
dist.init_process_group("gloo")
data = TensorDataset(torch.randn(1000, 4, generator=torch.Generator().manual_seed(9)))
loader = DataLoader(data, batch_size=25, sampler=DistributedSampler(data), drop_last=True)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters())
for (batch,) in loader:
    loss = (model(batch) - batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
