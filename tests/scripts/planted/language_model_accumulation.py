# planted: EV501, line 43, seen by running only
import math
import os

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, vocab = 32, 4, 64
gradient_accumulation_steps = 4
max_iters, learning_rate, warmup_iters = 12, 1e-3, 2

init_process_group(backend="gloo")
ddp_rank = int(os.environ["RANK"])
torch.manual_seed(1337 + ddp_rank)
data = torch.randint(vocab, (10_000,))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    return learning_rate * 0.5 * (1 + math.cos(math.pi * it / max_iters))


model = DDP(nn.Sequential(nn.Embedding(vocab, 16), nn.Linear(16, vocab)))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        x, y = get_batch()
        loss = F.cross_entropy(model(x).view(-1, vocab), y.view(-1))
        loss = loss / gradient_accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if ddp_rank == 0 and iter_num % 5 == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
destroy_process_group()
