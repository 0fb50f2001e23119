"""Plain torch scripts, each with one thing that keeps it from scaling; `benchmarks/remedies.py` tries remedies on them.

torchrun --nproc-per-node 2 benchmarks/remedies_script.py wide      # or thin, gpt, loader, network
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, LENGTH = 512, 64


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and classes; `seconds` is how long one takes to be fetched, as from a slow disk."""

    def __init__(self, size: int, width: int, seconds: float = 0.0) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, width, generator=drawn)
        self.y = torch.randint(10, (size,), generator=drawn)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.x[index], self.y[index]


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random sequences and what follows them."""

    def __init__(self, size: int) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=drawn)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of what follows each token; [batch * length, vocabulary]."""
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.blocks(x, mask=self.mask, is_causal=True)).flatten(0, 1)


def mlp(width: int, depth: int) -> nn.Module:
    """As deep and as wide as one says; ten classes."""
    layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def main(kind: str) -> None:
    """Train until somebody ends it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset: Dataset[tuple[Tensor, Tensor]]
    if kind in ("wide", "network"):
        model, dataset, batch = (
            mlp(1536 if kind == "wide" else 768, 3),
            Samples(4096, 1536 if kind == "wide" else 768),
            16,
        )
    elif kind == "thin":
        model, dataset, batch = mlp(32, 60), Samples(4096, 32), 16
    elif kind == "gpt":
        model, dataset, batch = GPT(), Tokens(2048), 4
    elif kind == "loader":
        model, dataset, batch = mlp(256, 2), Samples(4096, 256, seconds=0.001), 32
    else:
        raise SystemExit(f"{kind!r}: wide, thin, gpt, loader or network")
    model = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer
    if kind in ("wide", "gpt"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
    for epoch in range(100):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y.flatten()).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
