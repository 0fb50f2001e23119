"""As many ranks as GPUs; the batch of the command line is that of all of them, as is the learning rate."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", default=1024, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--resume", default="")


def worker(gpu, ngpus_per_node, args):
    dist.init_process_group("nccl", init_method="env://", world_size=ngpus_per_node, rank=gpu)
    torch.cuda.set_device(gpu)
    model = nn.Linear(8, 2).cuda(gpu)
    args.batch_size = int(args.batch_size / ngpus_per_node)
    model = DistributedDataParallel(model, device_ids=[gpu])
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    data = TensorDataset(torch.randn(4096, 8), torch.randint(0, 2, (4096,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda(gpu)), y.cuda(gpu))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if gpu == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    ngpus_per_node = torch.cuda.device_count()
    mp.spawn(worker, nprocs=ngpus_per_node, args=(ngpus_per_node, parser.parse_args()))
