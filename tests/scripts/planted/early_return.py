# planted: EV401, line 18
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main_process():
    return int(os.environ["RANK"]) == 0


def report(value):
    if not is_main_process():
        return
    dist.reduce(value, dst=0)
    print("mean loss", value.item() / dist.get_world_size())


def main(args):
    dist.init_process_group("gloo")
    dataset = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(9)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(torch.nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = model(x).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        report(loss.detach())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    main(parser.parse_args())
