# clean
import argparse
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class NoWriter:
    def add_scalar(self, *args):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--logdir", default="runs/experiment")
    args = parser.parse_args()
    dist.init_process_group(backend="gloo")
    is_main = dist.get_rank() == 0
    writer = SummaryWriter(args.logdir) if is_main else NoWriter()
    data = TensorDataset(torch.randn(160, 5), torch.randint(3, (160,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters())
    with suppress(KeyboardInterrupt):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            bar = tqdm(loader, disable=not is_main)
            for step, (x, y) in enumerate(bar):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                writer.add_scalar("loss", loss.item(), epoch * len(loader) + step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
