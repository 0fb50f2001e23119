"""A library of another repository joins the group and chooses the GPU."""
import argparse

import torch
from image_library import utils
from image_library.data import create_dataset, create_loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--local-rank", type=int, default=0)


def main():
    args = parser.parse_args()
    device = utils.init_distributed_device(args)
    model = nn.Linear(8, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    if args.distributed:
        model = NativeDDP(model, device_ids=[device])
    loader = create_loader(create_dataset("train"), distributed=args.distributed)
    for epoch in range(args.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if utils.is_primary(args):
            print(epoch, "done")


if __name__ == "__main__":
    main()
