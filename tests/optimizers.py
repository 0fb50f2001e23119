"""Optimizers as people write them: options that a step writes, methods of their own, sums over all parameters."""

from __future__ import annotations

import torch
from torch import optim


class ScheduleFree(optim.Optimizer):
    """SGD whose weights move between those that are stepped and their average (Defazio et al., 2024)."""

    def __init__(self, params: object, lr: float = 0.1, beta: float = 0.9, warmup_steps: int = 3) -> None:
        options = {"lr": lr, "beta": beta, "warmup_steps": warmup_steps, "k": 0, "weight_sum": 0.0, "trains": True}
        super().__init__(params, options)

    @torch.no_grad()
    def eval(self) -> int:
        """The weights are the average now. Returns how many it moved."""
        return sum(self._move(group, 1 - 1 / group["beta"], trains=False) for group in self.param_groups)

    @torch.no_grad()
    def train(self) -> int:
        """The weights are those that are stepped now. Returns how many it moved."""
        return sum(self._move(group, 1 - group["beta"], trains=True) for group in self.param_groups)

    def _move(self, group: dict, weight: float, *, trains: bool) -> int:
        if group["trains"] == trains:
            return 0
        group["trains"] = trains
        moved = [p for p in group["params"] if "z" in self.state[p]]
        for p in moved:
            p.lerp_(self.state[p]["z"], weight)
        return len(moved)

    @torch.no_grad()
    def step(self) -> None:
        """One step, while it trains."""
        for group in self.param_groups:
            assert group["trains"], "call train()"
            lr = group["lr"] * min(1.0, (group["k"] + 1) / group["warmup_steps"])
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone(memory_format=torch.preserve_format))
                p.lerp_(z, share).add_(p.grad, alpha=lr * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=lr)


class Adapts(optim.Optimizer):
    """SGD whose rate follows a sum over all its parameters, as Prodigy's and D-Adaptation's does."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            group["d"] = 0.9 * group["d"] + 0.1 * float(sum(g.square().sum() for g in gradients)) ** 0.5
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["d"])
