# clean
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser(description="runs alone as well as under torchrun")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", default="model.pt")
    args = parser.parse_args()
    args.distributed = "WORLD_SIZE" in os.environ
    if args.distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank() if args.distributed else 0
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")
    dataset = TensorDataset(torch.randn(640, 5, generator=torch.Generator().manual_seed(27)), torch.randn(640, 1, generator=torch.Generator().manual_seed(28)))
    sampler = DistributedSampler(dataset) if args.distributed else None
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=(sampler is None), sampler=sampler)
    model = torch.nn.Linear(5, 1).to(device)
    if args.distributed:
        model = DDP(model)
    raw_model = model.module if args.distributed else model
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if not args.distributed or rank == 0:
        torch.save(raw_model.state_dict(), args.output)
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
