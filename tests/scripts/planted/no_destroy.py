# planted: EV604, line 7
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(100, 2, generator=torch.Generator().manual_seed(9)), torch.randn(100, 1, generator=torch.Generator().manual_seed(10)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=10, sampler=sampler)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
