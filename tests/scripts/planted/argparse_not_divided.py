# planted: EV502, line 25, seen by running only
import argparse
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--accum-steps", type=int, default=2)
args = parser.parse_args()
dist.init_process_group("gloo")
dataset = TensorDataset(torch.randn(128, 4, generator=torch.Generator().manual_seed(15)), torch.randint(3, (128,), generator=torch.Generator().manual_seed(16)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(torch.nn.Linear(4, 3))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        is_last = (i + 1) % args.accum_steps == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
        if (i + 1) % args.accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
