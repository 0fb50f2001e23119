# planted: EV203, line 18
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--logdir", default="runs/experiment")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    writer = SummaryWriter(args.logdir)
    data = TensorDataset(torch.randn(160, 5), torch.randint(3, (160,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters())
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 5 == 0:
                writer.add_scalar("train/loss", loss.item(), step)
    writer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
