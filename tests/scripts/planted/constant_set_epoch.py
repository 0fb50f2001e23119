# planted: EV102, line 16
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(300, 12, generator=torch.Generator().manual_seed(9))
train_ds = TensorDataset(x, x.sum(1, keepdim=True))
train_sampler = DistributedSampler(train_ds, shuffle=True, seed=7)
train_dl = DataLoader(train_ds, batch_size=10, sampler=train_sampler)
net = DDP(torch.nn.Linear(12, 1))
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
num_epochs = 5
for ep in range(num_epochs):
    train_sampler.set_epoch(0)
    for xb, yb in train_dl:
        opt.zero_grad()
        torch.nn.functional.mse_loss(net(xb), yb).backward()
        opt.step()
dist.destroy_process_group()
