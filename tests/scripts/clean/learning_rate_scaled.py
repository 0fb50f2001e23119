# clean
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BASE_LR, BATCH = 0.1, 256
dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(4096, 6, generator=torch.Generator().manual_seed(9)), torch.randn(4096, 1, generator=torch.Generator().manual_seed(10)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
model = DDP(torch.nn.Linear(6, 1))
lr = BASE_LR * dist.get_world_size() * BATCH / 256
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
