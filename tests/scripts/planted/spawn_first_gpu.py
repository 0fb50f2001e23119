# planted: EV302, line 14
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def demo(rank, world_size, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    device = torch.device("cuda:0")
    dataset = TensorDataset(torch.randn(640, 10), torch.randn(640, 5))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    ddp_model = DDP(torch.nn.Linear(10, 5).to(device))
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.001)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp_model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    meeting = os.path.join(tempfile.mkdtemp(), "meeting")
    mp.spawn(demo, args=(2, meeting), nprocs=2, join=True)
