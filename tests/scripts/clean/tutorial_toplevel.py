# clean
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
master_process = int(os.environ["RANK"]) == 0
x = torch.randn(300, 12, generator=torch.Generator().manual_seed(9))
train_ds = TensorDataset(x, x.sum(1, keepdim=True))
train_dl = DataLoader(train_ds, batch_size=10, sampler=DistributedSampler(train_ds, seed=3))
net = torch.nn.Linear(12, 1)
net = DistributedDataParallel(net)
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
for ep in range(5):
    train_dl.sampler.set_epoch(ep)
    for i, (xb, yb) in enumerate(train_dl):
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(net(xb), yb)
        loss.backward()
        opt.step()
        if i % 10 == 0 and master_process:
            print(ep, i, loss.item())
dist.destroy_process_group()
