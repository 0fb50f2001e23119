import io
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def upload(state, client):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    client.put("model.pt", buffer)


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    if local_rank == 0:
        os.makedirs("/tmp/cache", exist_ok=True)
    data = TensorDataset(torch.randn(512, 8), torch.randint(0, 2, (512,)))
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=rank)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(build().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if local_rank == 0:
            upload(model.module.state_dict(), client=os)
        if rank == 0 and local_rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
