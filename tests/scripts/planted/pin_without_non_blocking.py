# planted: EV304, line 12
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_epoch(model, loader, optimizer, loss_fn, device):
    for batch, target in loader:
        batch = batch.to(device)
        target = target.to(device)
        optimizer.zero_grad()
        loss_fn(model(batch), target).backward()
        optimizer.step()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    data = TensorDataset(torch.randn(5000, 30), torch.randint(7, (5000,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=50, sampler=sampler, num_workers=4, pin_memory=True)
    model = DDP(torch.nn.Linear(30, 7).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, torch.nn.CrossEntropyLoss(), device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
