import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    prefix = f"[{rank}]"
    train_data = TensorDataset(torch.randn(512, 8, generator=torch.Generator().manual_seed(9)), torch.randint(0, 2, (512,), generator=torch.Generator().manual_seed(10)))
    sampler = DistributedSampler(train_data)
    train_dataloader = DataLoader(train_data, batch_size=16, sampler=sampler)
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    accumulation = 2
    num_update_steps_per_epoch = len(train_dataloader) // accumulation
    max_train_steps = 3 * num_update_steps_per_epoch
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=max_train_steps)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(train_dataloader):
            last = (step + 1) % accumulation == 0
            model.require_backward_grad_sync = last
            loss = F.cross_entropy(model(x), y) / accumulation
            loss.backward()
            if last:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        print(prefix, epoch, scheduler.get_last_lr())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
