# clean
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU())
        self.head = nn.Linear(20, 1000)
        self.extra = nn.Linear(20, 2)

    def forward(self, x, use_extra=False):
        x = self.body(x)
        if use_extra:
            return self.extra(x)
        return self.head(x)


dist.init_process_group("gloo")
model = TwoHeads()
model.head = nn.Linear(20, 5)
model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if torch.cuda.is_available() else model
ddp_model = DDP(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3)
dataset = TensorDataset(torch.randn(64, 10, generator=torch.Generator().manual_seed(9)), torch.randint(5, (64,), generator=torch.Generator().manual_seed(10)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
