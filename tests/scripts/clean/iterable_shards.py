"""A stream of text files: each worker of each rank reads files of its own."""

import glob
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    def __init__(self, pattern, block, rank, world_size):
        self.files = sorted(glob.glob(pattern))
        self.block, self.rank, self.world_size = block, rank, world_size

    def __iter__(self):
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        mine = self.files[self.rank * count + number :: self.world_size * count]
        for name in mine:
            with open(name, "rb") as file:
                while len(block := file.read(self.block + 1)) == self.block + 1:
                    tokens = torch.frombuffer(bytearray(block), dtype=torch.uint8).long()
                    yield tokens[:-1], tokens[1:]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_steps = int(os.environ.get("NUM_STEPS", 1000))
    stream = Shards("corpus/*.txt", 64, rank, world_size)
    loader = DataLoader(stream, batch_size=32, num_workers=2)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(loader)
    for step in range(num_steps):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 and rank == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
