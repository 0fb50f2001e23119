# planted: EV106, line 37
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

TEXT = b"the quick brown fox jumps over the lazy dog. " * 400


class ByteStream(IterableDataset):
    """Windows of bytes, one after the other."""

    def __init__(self, text, block_size):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.block_size = block_size

    def __iter__(self):
        for start in range(0, len(self.text) - self.block_size - 1, self.block_size):
            chunk = self.text[start : start + self.block_size + 1]
            yield chunk[:-1], chunk[1:]


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.head = nn.Linear(32, 256)

    def forward(self, idx):
        return self.head(self.embed(idx))


dist.init_process_group("gloo")
stream = ByteStream(TEXT, block_size=64)
loader = DataLoader(stream, batch_size=8)
model = DDP(Bigram())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for epoch in range(2):
    for idx, targets in loader:
        logits = model(idx)
        loss = F.cross_entropy(logits.view(-1, 256), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
