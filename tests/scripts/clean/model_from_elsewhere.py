"""The model comes from a module that isn't here, and is saved without its wrapper if it has one."""
import os

import torch
import torch.distributed as dist
from model_zoo import Configuration, build_model, load_data
from torch.nn.parallel import DistributedDataParallel as DDP

ddp = int(os.environ.get("RANK", -1)) != -1
master_process = True
if ddp:
    dist.init_process_group("gloo")
    master_process = dist.get_rank() == 0
model = build_model(Configuration(width=8))
optimizer = torch.optim.AdamW(model.parameters())
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model
loader = load_data(ddp)


def train():
    for epoch in range(3):
        for x, y in loader:
            loss = model(x, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        if master_process:
            checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(checkpoint, "checkpoint.pt")


train()
if ddp:
    dist.destroy_process_group()
