"""Handwritten digits on any number of replicas, and how far the answer is from that of one process.

    evenstep run --nproc-per-node 2 examples/digits.py
    evenstep run --nproc-per-node 2 examples/digits.py --resume    # after Ctrl-C, on any number of replicas

Trains a small convolutional network on scikit-learn's 1,797 images, then does the same again on one process, prints
what came out of both, and draws runs/digits/report.png.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

REPORT = Path("runs/digits/report.png")
CHECKPOINTS = Path("runs/digits/checkpoints")


def load_data():
    """1,437 images to train on and 360 to test with: [n, 1, 8, 8], 0 to 1, and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=360, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model():
    torch.manual_seed(0)  # both runs begin with the same parameters
    # Smooth throughout: at the kinks of ReLU and max-pooling a rounding error of 1e-8 can flip a whole gradient, and
    # after 100 steps two runs that agree would differ in the second digit (in float64 they agree to 1e-14 even so).
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1, stride=2),
        nn.GELU(),
        nn.Conv2d(64, 128, kernel_size=3, padding=1, stride=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(128 * 2 * 2, 10),
    )


@dataclass
class Run:
    """What one run leaves behind."""

    losses: list[float] = field(default_factory=list)  # the global mean, one for each step
    accuracies: list[tuple[int, float]] = field(default_factory=list)  # (steps so far, on held-out digits)
    rates: list[float] = field(default_factory=list)  # samples a second while training, one for each epoch
    parameters: list[torch.Tensor] = field(default_factory=list)

    def state_dict(self):
        """So that a run that is resumed draws all of its curve."""
        return {"losses": self.losses, "accuracies": self.accuracies, "rates": self.rates}

    def load_state_dict(self, state):
        self.losses, self.accuracies, self.rates = state["losses"], state["accuracies"], state["rates"]


@torch.no_grad()
def evaluate(model, loader, world):
    """The share of held-out digits that are recognised, each counted once."""
    correct, count = 0, 0
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()
        count += len(y)
    return world.mean(correct / max(count, 1), weight=count)


def train(world, num_epochs, batch_size, name="training", checkpoints=None, resume=False):
    train_set, test_set = load_data()
    model = evenstep.DistributedDataParallel(build_model().to(world.device), world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = evenstep.DataLoader(train_set, global_batch_size=batch_size, shuffle=True, world=world)
    test_loader = evenstep.DataLoader(test_set, global_batch_size=120, world=world)

    run = Run()
    if checkpoints is not None:
        checkpoint = evenstep.Checkpointer(
            checkpoints, world=world, every_steps=24, model=model, optimizer=optimizer, loader=loader, run=run
        )
        if resume:
            checkpoint.resume()
        else:
            checkpoint.discard()  # those of an earlier run: this one starts afresh
    for epoch in loader.epochs(num_epochs):
        start = time.perf_counter()
        for x, y in world.progress(loader, description=f"{name}, epoch {epoch}"):
            loss = F.cross_entropy(model(x), y)
            model.backward(loss, weight=len(x))  # the exact global mean, also on the short last batch
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(world.mean(loss, weight=len(x)).item())
            if checkpoints is not None:
                checkpoint.step()  # saves when due, and when asked to stop (SIGTERM)
        run.rates.append(len(train_set) / (time.perf_counter() - start))
        run.accuracies.append((len(run.losses), evaluate(model, test_loader, world)))
    if not run.accuracies or run.accuracies[-1][0] < len(run.losses):  # resumed from the last step of an epoch
        run.accuracies.append((len(run.losses), evaluate(model, test_loader, world)))
    run.parameters = [parameter.detach() for parameter in model.parameters()]
    return run


# ---------------------------------------------------------------------- what came out


def report(run, alone, world, path):
    """Print a table, and draw the curves of both runs."""
    difference = max(
        (ours - theirs).abs().max().item() for ours, theirs in zip(run.parameters, alone.parameters, strict=True)
    )
    replicas = "1 replica" if world.world_size == 1 else f"{world.world_size} replicas"
    table = Table(title="Handwritten digits")
    table.add_column()
    table.add_column(replicas, justify="right")
    table.add_column("one process", justify="right")
    for label, value_of in (
        ("accuracy on held-out digits", lambda r: f"{r.accuracies[-1][1]:.2%}"),
        ("loss of the last step", lambda r: f"{r.losses[-1]:.6f}"),
        ("samples a second (median epoch)", lambda r: f"{statistics.median(r.rates):,.0f}"),
        ("largest parameter", lambda r: f"{max(p.abs().max().item() for p in r.parameters):.3f}"),
    ):
        table.add_row(label, value_of(run), value_of(alone))
    table.add_row("largest difference of any parameter", f"{difference:.1e}", "")
    draw(run, alone, replicas, difference, path)
    Console().print(table)
    print(f"loss and accuracy over steps: {path}")


def draw(run, alone, replicas, difference, path):
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    ours, theirs, ink = "#1f6fb4", "#f2a33a", "#444444"
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.4), sharex=True, layout="constrained")
    steps = range(1, len(run.losses) + 1)
    # One process lies underneath, broad, so that one sees both lines where they are one.
    top.plot(steps, alone.losses, color=theirs, linewidth=5, solid_capstyle="round", label="one process")
    top.plot(steps, run.losses, color=ours, linewidth=1.3, label=replicas)
    top.set(yscale="log", ylabel="training loss (log scale)")
    top.legend(frameon=False)
    bottom.plot(*zip(*alone.accuracies, strict=True), color=theirs, linewidth=5, marker="o", markersize=9)
    bottom.plot(*zip(*run.accuracies, strict=True), color=ours, linewidth=1.3, marker="o", markersize=4)
    at, accuracy = run.accuracies[-1]
    bottom.annotate(
        f"{accuracy:.1%}", (at, accuracy), xytext=(0, -20), textcoords="offset points", ha="center", color=ours
    )
    bottom.yaxis.set_major_formatter(PercentFormatter(1))
    bottom.set(xlabel="step", ylabel="accuracy on held-out digits", xlim=(0, len(run.losses) * 1.04))
    for axes in (top, bottom):
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=ink)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.suptitle(
        f"Handwritten digits on {replicas} and on one process\n"
        f"after {len(run.losses)} steps no parameter differs by more than {difference:.1e}",
        color=ink,
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description="train on handwritten digits, and compare with one process")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of one step on all replicas together")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS, help="where they lie")
    parser.add_argument("--report", type=Path, default=REPORT, help="where to draw the curves")
    args = parser.parse_args()

    with evenstep.init(seed=0) as world:
        run = train(world, args.epochs, args.batch_size, checkpoints=args.checkpoints, resume=args.resume)
    if world.is_main:  # the other ranks have left
        alone = evenstep.World.alone(seed=0, device=world.device)
        report(run, train(alone, args.epochs, args.batch_size, name="once more on one process"), world, args.report)


if __name__ == "__main__":
    main()
