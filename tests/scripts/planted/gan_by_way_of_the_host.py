# planted: EV303, line 26
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["RANK"])
gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
dist.init_process_group("nccl")
G = DDP(nn.Linear(4, 16).cuda(gpu), device_ids=[gpu])
D = DDP(nn.Linear(16, 1).cuda(gpu), device_ids=[gpu])
g_opt = torch.optim.Adam(G.parameters(), 1e-4)
d_opt = torch.optim.Adam(D.parameters(), 1e-4)
dataset = TensorDataset(torch.randn(2048, 16))
sampler = DistributedSampler(dataset)
dataloader = DataLoader(dataset, batch_size=64, sampler=sampler, pin_memory=True)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (real,) in dataloader:
        real = real.cuda(gpu, non_blocking=True)
        fake = G(torch.randn(len(real), 4, device=gpu))
        frozen = fake.detach().cpu().to(gpu)
        d_loss = D(frozen).mean() - D(real).mean()
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        g_loss = -D(fake).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
dist.destroy_process_group()
