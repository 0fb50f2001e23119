"""Training runs whose bits are compared: the handwritten digits' CNN and a small language model, in reproducible mode.

What a run gives is told in digests, by what they are of, so that a difference has a name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep import world as worlds
from evenstep.ground.computing.virtual_ranks import begin_of

PADDING = -100


@contextlib.contextmanager
def reproducible(seed, virtual_ranks=8, **arguments):
    """A world in reproducible mode, in place of the one that is kept between tests."""
    before = worlds.initialised()
    if before is not None:
        before.close()
    with evenstep.init(seed=seed, quiet=True, reproducible=True, virtual_ranks=virtual_ranks, **arguments) as world:
        yield world


def digest(value):
    """Of a tensor's dtype, shape and bytes, or of whatever else prints itself."""
    if isinstance(value, torch.Tensor):
        text = f"{value.dtype} {list(value.shape)}".encode()
        return hashlib.sha256(text + value.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
    return repr(value)


def digests(name, value):
    """Of everything in a nest, by its path."""
    if isinstance(value, dict):
        return {path: d for key, each in value.items() for path, d in digests(f"{name}.{key}", each).items()}
    if isinstance(value, list | tuple):
        return {path: d for key, each in enumerate(value) for path, d in digests(f"{name}.{key}", each).items()}
    return {name: digest(value)}


def told(model, optimizer, losses, **others):
    state = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in state["param_groups"]]
    return (
        digests("losses", losses)
        | digests("model", dict(model.module.state_dict()))
        | digests("optimizer", {"state": state["state"], "groups": groups})
        | digests("others", others)
    )


# ---------------------------------------------------------------------- digits


class Digits(nn.Module):
    """Batch normalisation, dropout of three kinds of random numbers, and a module buffer that counts."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(48, 10)
        self.spare = nn.Linear(48, 10)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            x = x + 0.01 * random.random() + 0.01 * float(numpy.random.rand())
        features = self.dropout(self.features(x).flatten(1))
        # A layer that some virtual ranks use, and others don't.
        extra = self.spare(features) if not self.training or random.random() < 0.3 else 0.0
        return self.head(features) + extra


class Augmented(torch.utils.data.Dataset):
    """8 by 8 pixels, moved and with noise: otherwise in every epoch, and the same on any number of ranks."""

    def __init__(self, num_samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, 1, 8, 8, generator=generator)
        self.y = torch.randint(10, (num_samples,), generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        noise = torch.from_numpy(numpy.random.standard_normal((1, 8, 8))).float()
        return self.x[index].roll(random.randrange(3), dims=-1) + 0.1 * noise + 0.1 * torch.rand(()), self.y[index]


def digits(num_steps, seed, sharded=False, transport=None, num_workers=0, plain=False, device=None):
    """103 samples in global batches of 20: the last one has 3, so that most virtual ranks are empty."""
    with reproducible(seed, transport=transport, device=device) as world:
        model = evenstep.DistributedDataParallel(Digits(), bucket_cap_mb=0.01, first_bucket_cap_mb=0.002)
        if sharded:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = evenstep.DataLoader(Augmented(103, seed), global_batch_size=20, shuffle=True, num_workers=num_workers)
        losses, step = [], 0
        for _ in loader.epochs(num_steps):
            for batch in loader:
                own = []
                for x, y in model.microbatches(batch):
                    loss = F.cross_entropy(model(x), y)
                    own.append(loss.detach())
                    if plain:
                        loss.backward()
                    else:
                        model.backward(loss, weight=len(x) / 7)
                losses.append(world.gather(torch.tensor(own)))
                optimizer.step()
                if step % 6 != 4:  # before the short batch gradients stay, and its own are added to them
                    optimizer.zero_grad(set_to_none=step % 3 != 1)
                step += 1
                if step == num_steps:
                    outside = [torch.rand(2), random.random(), float(numpy.random.rand())]
                    return told(model, optimizer, losses, outside=outside, loader=loader.state_dict())
    raise AssertionError("unreachable")


def digits_until(folder, stop, seed, killed):
    """Trains up to a step, from the newest checkpoint on; then ends, or is killed in the middle of a later step."""
    with reproducible(seed) as world:
        model = evenstep.DistributedDataParallel(Digits(), bucket_cap_mb=0.01, first_bucket_cap_mb=0.002)
        if world.world_size % 4:  # a state goes from the divided optimizer to the plain one and back
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
        loader = evenstep.DataLoader(Augmented(103, seed), global_batch_size=20, shuffle=True)
        with evenstep.Checkpointer(
            folder, every_steps=3, model=model, optimizer=optimizer, loader=loader
        ) as checkpointer:
            checkpointer.resume()
            for _ in loader.epochs(stop):
                for batch in loader:
                    for number, (x, y) in enumerate(model.microbatches(batch)):
                        model.backward(F.cross_entropy(model(x), y), weight=len(x))
                        if killed and checkpointer.num_steps == stop and world.rank == world.world_size - 1:
                            os.kill(os.getpid(), signal.SIGKILL)
                        assert number < 8
                    optimizer.step()
                    optimizer.zero_grad()
                    checkpointer.step()
                    if checkpointer.num_steps == stop and not killed:
                        state = told(model, optimizer, [], loader=loader.state_dict())
                        checkpointer.save()
                        outside = [torch.rand(2), random.random(), float(numpy.random.rand())]
                        return state | digests("outside", outside)
    raise AssertionError("unreachable")


# ---------------------------------------------------------------------- a language model


class Block(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        n, length, width = x.shape
        heads = (n, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.reshape(heads).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norms[1](x))


class Language(nn.Module):
    """Tied embeddings; the second block is computed again in the backward pass."""

    def __init__(self, width=32, length=12):
        super().__init__()
        self.embedding, self.position = nn.Embedding(64, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 4), Block(width, 4)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        x = checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)
        return F.linear(self.norm(x), self.embedding.weight)


def sentences(num_samples, seed):
    """Of random length; a sentence may have no symbol at all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(64, (num_samples, 12), generator=generator)
    y = torch.randint(64, (num_samples, 12), generator=generator)
    y[torch.arange(12)[None] >= torch.randint(0, 13, (num_samples, 1), generator=generator)] = PADDING
    return torch.utils.data.TensorDataset(x, y)


def language(num_steps, seed, sharded=None, transport=None, scaled=False, device=None):
    """Global batches of 26 in virtual ranks of two parts, 70 samples: the last batch has 18."""
    with reproducible(seed, transport=transport, device=device) as world:
        model = evenstep.DistributedDataParallel(Language(), bucket_cap_mb=0.02, first_bucket_cap_mb=0.01)
        if sharded is None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2, **sharded)
        scaler = torch.amp.GradScaler(world.device.type, init_scale=256.0, growth_interval=4) if scaled else None
        loader = evenstep.DataLoader(sentences(70, seed), global_batch_size=26, shuffle=True)
        losses, step = [], 0
        for _ in loader.epochs(num_steps):
            for batch in loader:
                own = []
                for x, y in model.microbatches(batch, 2):
                    with torch.autocast(world.device.type, torch.bfloat16):
                        logits = model(x)
                    num_symbols = (y != PADDING).sum()
                    loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=PADDING)
                    own.append(loss.detach())
                    model.backward(loss, weight=num_symbols, scaler=scaler)
                losses.append(world.gather(torch.tensor(own)))
                if scaler is not None:
                    scaler.unscale_(optimizer)
                losses.append(evenstep.clip_grad_norm_(model.parameters(), 0.5))
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
                step += 1
                if step == num_steps:
                    return told(model, optimizer, losses, scale=None if scaler is None else scaler.get_scale())
    raise AssertionError("unreachable")


# ---------------------------------------------------------------------- statistics over virtual ranks


def _normalising(layer):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 5), layer(5), nn.Tanh(), nn.Linear(5, 2)).double()


def normalised(seed, transport=None):
    """A SyncBatchNorm, a virtual rank on each rank, some of them empty; and how far it is from one process's
    BatchNorm."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(num, 3, dtype=torch.float64, generator=generator) for num in (11, 8, 2, 0, 5)]
    alone = _normalising(nn.BatchNorm1d)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x in filter(len, batches):  # of a batch without samples nothing is learned
        plain.zero_grad()
        alone(x).square().mean().backward()
        plain.step()
    num_virtual_ranks = worlds.initialised().world_size
    with reproducible(seed, virtual_ranks=num_virtual_ranks, transport=transport) as world:
        model = evenstep.DistributedDataParallel(_normalising(evenstep.SyncBatchNorm))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch in batches:
            first, last = (begin_of(len(batch), world.rank + i, world.world_size) for i in (0, 1))
            for x in model.microbatches(batch[first:last]):
                loss = model(x).square().mean() if len(x) else model(x).sum()
                model.backward(loss, weight=len(x))
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        states = zip(model.module.state_dict().values(), alone.state_dict().values(), strict=True)
        distance = max(float((mine - theirs).abs().max()) for mine, theirs in states)
        return told(model, optimizer, []), distance
