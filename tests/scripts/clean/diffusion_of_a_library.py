"""Batches come from a library's loader; noise levels are drawn here, from the same seed on all ranks."""
import torch
import torch.distributed as dist
from image_library import make_loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
loader = make_loader("train", rank=dist.get_rank(), world_size=dist.get_world_size())
for epoch in range(3):
    for x in loader:
        level = torch.randint(0, 1000, (len(x), 1))
        loss = (model(x + level / 1000) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
