# planted: EV509, line 16
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

num_epochs, batch_size = 2, 16
dist.init_process_group("gloo")
train_dataset = TensorDataset(torch.randn(256, 3, generator=torch.Generator().manual_seed(9)), torch.randn(256, 1, generator=torch.Generator().manual_seed(10)))
sampler = DistributedSampler(train_dataset)
loader = DataLoader(train_dataset, batch_size=batch_size, sampler=sampler)
model = DDP(torch.nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
total_steps = num_epochs * (len(train_dataset) // batch_size)
scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=total_steps)
for epoch in range(num_epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
dist.destroy_process_group()
