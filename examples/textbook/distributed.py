"""The DistributedDataParallel program: it spawns its own processes, one per replica.

    python examples/textbook/distributed.py
    python examples/textbook/distributed.py --with torch

The process group is the script's own, made as in any torch program; evenstep's classes adopt it.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, NUM_FEATURES = 1000, 100


def ddp_setup(rank, world_size, meeting_point):
    # A file, and not an address and port: nothing listens, and two runs on one machine can't meet.
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, train_data, optimizer, rank):
        self.model = model
        self.train_data = train_data
        self.optimizer = optimizer
        self.rank = rank

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        losses = torch.stack([self._run_batch(source, targets) for source, targets in self.train_data])
        loss = losses.mean()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        if self.rank == 0:
            print(f"epoch {epoch}: {len(self.train_data)} steps on each replica, loss {loss:.4f}", flush=True)
        return loss.item()

    def train(self, max_epochs):
        loss = float("nan")
        for epoch in range(max_epochs):
            loss = self._run_epoch(epoch)
        return loss


def load_train_objects():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    targets = features @ torch.randn(NUM_FEATURES, 1, generator=generator) / NUM_FEATURES**0.5
    targets += 0.3 * torch.randn(NUM_SAMPLES, 1, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Linear(NUM_FEATURES, 1)
    return TensorDataset(features, targets), model, torch.optim.SGD(model.parameters(), lr=0.05)


def main(rank, args, meeting_point):
    torch.set_num_threads(1)  # spawned processes would otherwise take all cores each
    ddp_setup(rank, args.nproc, meeting_point)
    try:
        loss = train(rank, args)
        if rank == 0:
            print(f"final loss: {loss:.4f}")
    finally:
        dist.destroy_process_group()


def train(rank, args):
    """Loss of the last epoch. The model ends with this function: torch's must not outlive its process group."""
    if args.classes == "torch":
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data.distributed import DistributedSampler
    else:
        from evenstep import DistributedDataParallel, DistributedSampler
    dataset, model, optimizer = load_train_objects()
    sampler = DistributedSampler(dataset, shuffle=args.shuffle)
    train_data = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    return Trainer(DistributedDataParallel(model), train_data, optimizer, rank).train(args.epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DistributedDataParallel with processes of its own")
    parser.add_argument("--with", dest="classes", choices=["evenstep", "torch"], default="evenstep")
    parser.add_argument("--nproc", type=int, default=2, help="replicas")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per replica and step")
    parser.add_argument(
        "--no-shuffle", dest="shuffle", action="store_false", help="keep the order, which the two shuffle differently"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, args=(args, Path(folder) / "meeting-point"), nprocs=args.nproc)
