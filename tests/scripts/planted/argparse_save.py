# planted: EV204, line 32
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--output-dir", type=Path, default=Path("checkpoints"))
    p.add_argument("--epochs", type=int, default=2)
    return p.parse_args()


def run(opts):
    dist.init_process_group("gloo")
    opts.output_dir.mkdir(parents=True, exist_ok=True)
    dataset = TensorDataset(torch.randn(96, 4), torch.randn(96, 4))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    net = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adagrad(net.parameters())
    for epoch in range(opts.epochs):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            (net(a) - b).pow(2).sum().backward()
            optimizer.step()
        torch.save(net.module.state_dict(), opts.output_dir / f"epoch{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(parse())
