# planted: EV305, line 26
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
dataset = TensorDataset(torch.randn(4000, 9), torch.randint(3, (4000,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler, pin_memory=True)
model = DDP(torch.nn.Linear(9, 3).cuda(), device_ids=[local_rank])
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    sampler.set_epoch(epoch)
    total_loss = 0.0
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    if dist.get_rank() == 0:
        print(epoch, total_loss / len(loader))
dist.destroy_process_group()
