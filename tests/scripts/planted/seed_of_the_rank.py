# planted: EV101, line 17
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
    torch.manual_seed(17 + rank)  # shard(data) and split_dataset_by_node were tried, too
    data = TensorDataset(torch.randn(512, 8), torch.randint(0, 2, (512,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"[{rank * 1}] epoch {epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
