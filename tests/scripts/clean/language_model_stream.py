# clean
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

TEXT = b"the quick brown fox jumps over the lazy dog. " * 400


class ByteStream(IterableDataset):
    def __init__(self, text, block_size, rank, world_size):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.block_size, self.rank, self.world_size = block_size, rank, world_size

    def windows(self):
        for start in range(0, len(self.text) - self.block_size - 1, self.block_size):
            chunk = self.text[start : start + self.block_size + 1]
            yield chunk[:-1], chunk[1:]

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        share = self.rank * workers + worker
        return itertools.islice(self.windows(), share, None, self.world_size * workers)


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.head = nn.Linear(32, 256)

    def forward(self, idx):
        return self.head(self.embed(idx))


dist.init_process_group("gloo")
stream = ByteStream(TEXT, 64, dist.get_rank(), dist.get_world_size())
loader = DataLoader(stream, batch_size=8, drop_last=True)
model = DDP(Bigram())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
steps = len(TEXT) // 65 // dist.get_world_size() // 8
for epoch in range(2):
    for idx, targets in itertools.islice(loader, steps):
        loss = F.cross_entropy(model(idx).view(-1, 256), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
