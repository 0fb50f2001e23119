"""As much of accelerate as a script of the corpus needs: its own isn't installed where these tests run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Accelerator:
    """Wraps, divides by the number of passes, and steps with the last of them."""

    def __init__(self, gradient_accumulation_steps: int = 1) -> None:
        self._num_passes, self._passed = gradient_accumulation_steps, 0
        dist.init_process_group("gloo")

    def prepare(self, *things: Any) -> list[Any]:
        """The same things, for several ranks."""
        return [self._prepared(each) for each in things]

    def _prepared(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return DistributedDataParallel(thing)
        if isinstance(thing, DataLoader):
            sampler: DistributedSampler[Any] = DistributedSampler(thing.dataset, shuffle=False)  # type: ignore[arg-type]
            return DataLoader(thing.dataset, thing.batch_size, sampler=sampler)
        return _Optimizer(thing, self)

    @property
    def is_last(self) -> bool:
        """Whether this pass is the last of its step."""
        return self._passed % self._num_passes == 0

    @contextlib.contextmanager
    def accumulate(self, model: Any) -> Iterator[None]:
        """One pass."""
        self._passed += 1
        with contextlib.nullcontext() if self.is_last else model.no_sync():
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Of the mean over passes."""
        (loss / self._num_passes).backward()


class _Optimizer:
    def __init__(self, inner: Any, accelerator: Accelerator) -> None:
        self._inner, self._accelerator = inner, accelerator

    def step(self) -> None:
        if self._accelerator.is_last:
            self._inner.step()

    def zero_grad(self) -> None:
        if self._accelerator.is_last:
            self._inner.zero_grad()
