# planted: EV102, line 31
import argparse

import torch
import torch.nn.functional as F
from torch import distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.01, type=float)
    return parser.parse_args()


def train_one_epoch(model, loader, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def main(args):
    distributed.init_process_group(backend="gloo")
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = optim.AdamW(model.parameters(), lr=args.lr)
    for _ in range(args.epochs):
        train_one_epoch(model, loader, optimizer)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(get_args())
