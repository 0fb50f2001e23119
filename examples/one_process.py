"""A training loop for one process, as one begins with. What it needs for several, `evenstep convert` writes:

    evenstep convert examples/one_process.py               # shows the changes; --write makes them
    evenstep convert examples/one_process.py --verify      # do one rank and two compute the same?

And what has been forgotten in a script that is data-parallel already, `evenstep doctor` finds:

    evenstep doctor examples/textbook/torchrun.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_spirals(num_samples: int) -> TensorDataset:
    """Points of three spirals, and which of them each belongs to."""
    kinds = torch.arange(num_samples) % 3
    radius = torch.rand(num_samples)
    angle = 4 * radius + kinds * 2.1 + 0.1 * torch.randn(num_samples)
    return TensorDataset(torch.stack([radius * angle.sin(), radius * angle.cos()], dim=1), kinds)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: str) -> float:
    """Share of points whose spiral is told."""
    model.eval()
    right = total = 0
    for points, kinds in loader:
        guesses = model(points.to(device)).argmax(1)
        right += (guesses == kinds.to(device)).sum().item()
        total += len(points)
    model.train()
    return right / total


def main() -> None:
    """Train, and say how it goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(make_spirals(1500), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(make_spirals(500), batch_size=250)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        total_loss = 0.0
        for points, kinds in loader:
            points, kinds = points.to(device), kinds.to(device)
            loss = F.cross_entropy(model(points), kinds)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total_loss += loss.item()
        accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch}: loss {total_loss / len(loader):.4f}, {accuracy:.1%} right")
    torch.save(model.state_dict(), "spirals.pt")


if __name__ == "__main__":
    main()
