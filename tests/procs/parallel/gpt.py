"""A small GPT, its data with uneven numbers of tokens, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 29, 16, 4, 2, 7
PAD = -100


class Block(nn.Module):
    """Attention and a feed-forward layer, with projections of their own for a tensor plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # Keys without a bias: its gradient is zero but for rounding, which Adam would make steps of.
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.norm_1(x)
        q, k, v = (p(h).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan() -> dict[str, Any]:
    """Columns and rows by turns, in every block."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel)
    rows = dict.fromkeys(("out", "down"), RowwiseParallel)
    return {f"blocks.*.{name}": style() for name, style in (columns | rows).items()}


def made(seed: int, dtype: torch.dtype) -> GPT:
    """The model with the weights that a seed gives."""
    torch.manual_seed(seed)
    return GPT().to(dtype)


def batches(seed: int, steps: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches: tokens [rows, LENGTH], and targets of which each row has a number of its own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
        targets = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
        yield tokens, torch.where(torch.arange(LENGTH) < lengths, targets, PAD)


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The mean over tokens, and how many they are."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD), int((targets != PAD).sum())


def train(
    model: Any,
    share_of: Callable[[Tensor], Tensor],
    *,
    seed: int,
    steps: int,
    rows: int,
    micro: int = 1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    clip: float | None = 0.5,
) -> tuple[list[float], list[float]]:
    """Losses (of this rank's last part) and norms of all steps, with a model of evenstep's."""
    stepping, norms, losses = optimizer(model.parameters(), lr=1e-2), [], []
    for tokens, targets in batches(seed, steps, rows):
        for x, y in model.microbatches((share_of(tokens), share_of(targets)), micro):
            loss, weight = loss_of(model(x), y)
            model.backward(loss, weight=weight)
            losses.append(loss.item())
        if clip is not None:
            import evenstep

            norms.append(float(evenstep.clip_grad_norm_(model, clip)))
        stepping.step()
        stepping.zero_grad()
    return losses, norms


def reference(
    *,
    seed: int,
    steps: int,
    rows: int,
    dtype: torch.dtype = torch.float64,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    clip: float | None = 0.5,
    nudge: int | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Plain torch in one process: the parameters at the end, and the norms of all steps.

    `nudge`: each weight begins one rounding away, up or down as this seed draws. What that makes of the answer is
    what rounding makes: AdamW divides a gradient that is almost zero by its own size.
    """
    model, norms = made(seed, dtype), []
    if nudge is not None:
        generator = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for p in model.parameters():
                up = torch.randint(0, 2, p.shape, generator=generator).to(dtype)
                p.mul_(1 + torch.finfo(dtype).eps * (2 * up - 1))
    stepping = optimizer(model.parameters(), lr=1e-2)
    for tokens, targets in batches(seed, steps, rows):
        loss_of(model(tokens), targets)[0].backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        stepping.step()
        stepping.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters of a divided model, whole. Collective."""
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
    }
