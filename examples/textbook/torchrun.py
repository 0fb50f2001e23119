"""The torchrun program: AdamW, gradient accumulation, and checkpoints that rank 0 writes and every rank resumes from.

    torchrun --nproc-per-node 2 examples/textbook/torchrun.py
    evenstep run --nproc-per-node 2 examples/textbook/torchrun.py --snapshot runs/textbook/snapshot.pt

Started again with the same --snapshot it goes on where it stopped.
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_dataset(num_samples=2000, num_features=20, num_classes=4):
    """Random samples, labelled by a random network."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(num_samples, num_features, generator=generator)
    hidden = torch.tanh(features @ torch.randn(num_features, 16, generator=generator) / 2)
    return TensorDataset(features, (hidden @ torch.randn(16, num_classes, generator=generator)).argmax(1))


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def save_snapshot(path, model, optimizer, epochs_run, loss):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs_run": epochs_run,
        "loss": loss,
    }
    torch.save(state, partial)
    os.replace(partial, path)  # whole or not at all: a kill while writing leaves the last one


def run_epoch(model, loader, optimizer, accumulation):
    total = torch.zeros(1)
    for index, (x, y) in enumerate(loader):
        first = index - index % accumulation
        num_in_window = min(accumulation, len(loader) - first)
        last_in_window = index == first + num_in_window - 1
        # Gradients add up on each rank; they travel once, with the last microbatch.
        with contextlib.nullcontext() if last_in_window else model.no_sync():
            loss = F.cross_entropy(model(x), y)
            (loss / num_in_window).backward()
        if last_in_window:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / dist.get_world_size()


def train(args):
    """Loss of the last epoch. The model ends with this function: torch's must not outlive its process group."""
    if args.classes == "torch":
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data.distributed import DistributedSampler
    else:
        from evenstep import DistributedDataParallel, DistributedSampler

    rank = dist.get_rank()
    dataset = make_dataset()
    sampler = DistributedSampler(dataset, shuffle=args.shuffle)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    epochs_run, loss = 0, float("nan")
    if args.snapshot is not None and args.snapshot.exists():
        snapshot = torch.load(args.snapshot, weights_only=True)
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        epochs_run, loss = snapshot["epochs_run"], snapshot["loss"]
        if rank == 0:
            print(f"resuming after epoch {epochs_run - 1}", flush=True)
    dist.barrier()  # every rank has looked for the snapshot before rank 0 writes the next one

    for epoch in range(epochs_run, args.epochs):
        sampler.set_epoch(epoch)
        loss = run_epoch(model, loader, optimizer, args.accumulation)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
            if args.snapshot is not None:
                save_snapshot(args.snapshot, model, optimizer, epoch + 1, loss)
    return loss


def main():
    parser = argparse.ArgumentParser(description="AdamW with accumulation, checkpoints and resume")
    parser.add_argument("--with", dest="classes", choices=["evenstep", "torch"], default="evenstep")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=25, help="samples per replica and microbatch")
    parser.add_argument("--accumulation", type=int, default=4, help="microbatches per step")
    parser.add_argument("--snapshot", type=Path, help="file to write every epoch, and to resume from")
    parser.add_argument(
        "--no-shuffle", dest="shuffle", action="store_false", help="keep the order, which the two shuffle differently"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, "torchrun.py needs a launcher: evenstep run --nproc-per-node 2 examples/textbook/torchrun.py\n")
    dist.init_process_group("gloo")
    try:
        loss = train(args)
        if dist.get_rank() == 0:
            print(f"final loss: {loss:.4f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
