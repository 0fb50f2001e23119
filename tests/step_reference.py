"""One process with torch's own optimizer, which has everybody's samples: what test_step_combinations.py compares with.

It runs each rank's samples by themselves, adds gradients up in float64, and keeps count of how large what it added was:
that, and not the sum, is what roundings are relative to.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.step_cases import EXPONENTS, HALF, Branches, Case, Window, groups_of, loss_of, poison_of

_SCALE = 64.0  # not so large that 16 bits overflow, nor so small that halving it says nothing


def build_scaler(case: Case) -> torch.amp.GradScaler | None:
    """A scaler that grows fast."""
    if case.scaler is None:
        return None
    scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE, growth_interval=2, enabled=case.scaler)
    scaler.scale(torch.zeros(()))  # torch's makes its scale of the first loss, which a rank without samples hasn't
    return scaler


def build_optimizers(case: Case, groups: list[dict[str, object]], second: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Of torch's classes."""
    made: list[torch.optim.Optimizer] = [getattr(torch.optim, case.kind)(groups, **copy.deepcopy(case.options))]
    return [*made, torch.optim.SGD(second, lr=0.1)] if second else made


class Reference:
    """A model that is trained in one process.

    Attributes:
        module: Computes gradients, of the parameters that the ranks have.
        stepped: Has what is stepped: the same, or float32 likenesses of 16 bits.
        norms: What the last step's clipping said, by optimizer.
        added: By parameter of `stepped`, an upper bound of what rounding errors are relative to: the absolute values
            of all gradients that went into the next step, and of the steps before that a momentum remembers.
        since: The sum of `added` over all steps since `stepped` last was what the ranks have.
        largest: The largest that `added` has been.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.module = Branches(case)
        self.stepped = copy.deepcopy(self.module)
        for parameter in self.stepped.parameters():
            if not parameter.is_complex():
                parameter.data = parameter.data.to(case.step_dtype)
        groups, second, self.late = groups_of(case, self.stepped)
        self.optimizers = build_optimizers(case, groups, second)
        self.scaler = build_scaler(case)
        self.norms: list[Tensor] = []
        self.added = [torch.zeros((), dtype=torch.float64) for _ in self.stepped.parameters()]
        self.since = [*self.added]
        self.largest = 0.0

    def pairs(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(number, parameter of `module`, parameter of `stepped`)."""
        both = zip(self.module.parameters(), self.stepped.parameters(), strict=True)
        yield from ((number, own, stepped) for number, (own, stepped) in enumerate(both))

    def run(self, window: Window) -> None:
        """Add the mean of a window's gradients, over all ranks that there are at the beginning of a join."""
        case = self.case
        if window.poison is not None and case.skips:
            self.stepped.zero_grad()  # all ranks leave out this window and what was there before it
            return
        counted = [part for parts in window.parts for part in parts if part.counts(case)]
        total = sum(part.weight for part in counted) if case.weighted else float(len(window.parts))
        sums: dict[int, Tensor] = {}
        for rank, parts in enumerate(window.parts):
            self.module.zero_grad()
            for part in parts:
                if not part.counts(case):
                    continue
                loss = loss_of(case, self.module, part)
                if window.poison is not None and window.poison[0] == rank and part is parts[-1]:
                    loss = loss + poison_of(self.module, window.poison[1])
                if self.scaler is not None:
                    loss = self.scaler.scale(loss)
                # Of a loss in float32: a weight over the total is no number that overflows 16 bits.
                (loss * (part.weight / total if case.weighted else 1.0)).backward()
            for number, own, _ in self.pairs():
                if own.grad is not None:
                    wide = own.grad.to(torch.complex128 if own.is_complex() else torch.float64)
                    mine = wide if case.weighted else wide / total
                    sums[number] = sums[number] + mine if number in sums else mine
                    self.added[number] = self.added[number] + mine.abs().max()
        for number, _, stepped in self.pairs():
            if number in sums:
                mean = sums[number].to(stepped.dtype)
                stepped.grad = mean if stepped.grad is None else stepped.grad + mean

    def step(self) -> None:
        """Unscale, clip, step."""
        case, self.norms, has_stepped = self.case, [], False
        for optimizer in self.optimizers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if all(p.grad is None for p in params):  # torch's clipping by value and its scaler refuse those
                self.norms.append(torch.zeros(0))
                if self.scaler is None:
                    optimizer.step()
                continue
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            self.norms.append(self._clip(optimizer, params))
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                has_stepped = True
        if case.scaler:
            assert self.scaler is not None
            scale = self.scaler.get_scale()
            # What no optimizer has yet is not unscaled; if nobody zeroes it, it is there in the next step.
            stepped = {p for each in self.optimizers for group in each.param_groups for p in group["params"]}
            sizes = zip(self.added, self.stepped.parameters(), strict=True)
            self.added = [size / scale if p in stepped else size for size, p in sizes]
        self.since = [so_far + self.gradient_size(number) for number, so_far in enumerate(self.since)]
        self.largest = max(self.largest, *(float(each.nan_to_num(0.0, 0.0)) for each in self.added))
        if self.scaler is not None and has_stepped:
            self.scaler.update()

    def _clip(self, optimizer: torch.optim.Optimizer, params: list[Tensor]) -> Tensor:
        case, limit = self.case, 0.3
        if case.clip == "group":
            each = [nn.utils.clip_grad_norm_(group["params"], limit) for group in optimizer.param_groups]
            return torch.stack([norm.double() for norm in each])
        if case.clip in EXPONENTS:
            return nn.utils.clip_grad_norm_(params, limit, EXPONENTS[case.clip]).reshape(1).double()
        if case.clip == "value":
            nn.utils.clip_grad_value_(params, 0.05)
        return torch.zeros(0)

    def zero_grad(self, by: str, set_to_none: bool) -> None:
        """As the ranks do it. What is left, and what a momentum remembers, goes on counting in `added`."""
        for each in {"model": [self.stepped], "optimizers": self.optimizers, "nobody": []}[by]:
            each.zero_grad(set_to_none)
        remembered = 0.9 if "momentum" in self.case.options else 0.0
        for number, _, stepped in self.pairs():  # also one that no optimizer has yet may keep its gradient
            is_left = stepped.grad is not None and bool(stepped.grad.any())
            self.added[number] = self.added[number].nan_to_num(0.0, 0.0) * (1.0 if is_left else remembered)

    def follow(self, model: nn.Module) -> None:
        """The next gradients are those of the ranks' parameters, and where they are rounded so is what is stepped.

        A rank that has left a join has none, and gives what is stepped here: errors of its steps add up.
        """
        case = self.case
        theirs = [each.detach() for each in model.parameters()]
        for number, own, stepped in self.pairs():
            own.data.copy_(theirs[number])
            if not (case.is_exact or case.is_master or model is self.stepped):
                stepped.data.copy_(theirs[number])
                self.since[number] = torch.zeros((), dtype=torch.float64)

    def write(self, values: list[Tensor]) -> None:
        """What all ranks' parameters hold now."""
        for number, own, stepped in self.pairs():
            own.data.copy_(values[number])
            stepped.data.copy_(values[number])
            self.since[number] = torch.zeros((), dtype=torch.float64)

    # ------------------------------------------------------------------ how far the ranks may be from here

    @property
    def _unit(self) -> float:
        return self.case.eps * (1e4 if self.case.is_exact else 10.0)

    def tolerance(self, number: int) -> Tensor:
        """Of a parameter after a step. 0-dim."""
        largest_rate = max(float(group["lr"]) for each in self.optimizers for group in each.param_groups)
        # What the others divide by, and their `eps` in 32 bits, makes more of errors than the rate does.
        rate = 2 * largest_rate if self.case.kind == "SGD" else 1.0
        stepped = list(self.stepped.parameters())[number].detach()
        size = stepped.abs().amax().double() / (4.0 if self.case.dtype in HALF else 1.0)  # rounded, and nothing more
        return self._unit * (size + rate * self.since[number]) + self.case.eps * 1e-3

    def gradient_tolerance(self, number: int) -> Tensor:
        """Of a gradient. 0-dim."""
        return self._unit * self.gradient_size(number) + 1e-300

    def gradient_size(self, number: int) -> Tensor:
        """What a gradient was added up from. 0-dim."""
        return self.added[number].nan_to_num(0.0, 0.0)

    @property
    def state_tolerance(self) -> float:
        """Of what an optimizer remembers: gradients, their squares, parameters, numbers of steps."""
        return self._unit * (10.0 + self.largest + self.largest**2)
