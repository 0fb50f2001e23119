"""Faults on request, at a rank, step and phase, to test how a script and evenstep react. Public.

    evenstep run --nproc-per-node 2 --inject "kill:rank=1,step=7" train.py

or, in a script or a test, on every rank:

    install("raise:rank=0,step=3,phase=backward", rank=world.rank)

A step is one call of an optimizer's `step`, counted from 0. Phases: `forward` (the outermost module's forward begins),
`backward` (its outputs' gradients have been computed), `optimizer` (`step` is about to run). The script stays
unchanged: torch's global hooks are used, so that torch's own wrapper can be tested, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenstep.console import say
from evenstep.errors import ConfigurationError

PHASES = ("forward", "backward", "optimizer")
KINDS = {
    "kill": "SIGKILL to itself",
    "stop": "SIGSTOP to itself; another process may continue it",
    "raise": "a RuntimeError",
    "exit": "sys.exit(0), as at an orderly end",
    "segfault": "reads address 0",
    "hang": "never returns, and holds the interpreter lock",
    "nan": "NaN in a gradient, before it is added to the others'",
    "drift": "changes the first parameter, so that replicas are no longer equal",
}
_SPOIL = ("nan", "drift")  # kinds of faults that need the model


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, and where and when it happens.

    Attributes:
        kind: One of `KINDS`.
        rank: The rank that fails.
        step: The step, from 0.
        phase: The phase of the step.
    """

    kind: str
    rank: int
    step: int
    phase: str = "forward"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(f"fault {self.kind!r}: use one of {', '.join(KINDS)}.")
        if self.phase not in PHASES:
            raise ConfigurationError(f"fault {self}: no phase {self.phase!r}; use {', '.join(PHASES)}.")
        if min(self.rank, self.step) < 0:
            raise ConfigurationError(f"fault {self}: rank and step are at least 0.")
        if self.kind in _SPOIL and self.phase != "forward":
            raise ConfigurationError(
                f"fault {self}: this fault always happens as the forward pass begins; leave out the phase."
            )

    def __str__(self) -> str:
        return f"{self.kind}:rank={self.rank},step={self.step},phase={self.phase}"


def parse_faults(text: str) -> list[Fault]:
    """Parse faults from a text such as "kill:rank=1,step=7; hang:rank=0,step=2". Pure.

    Raises:
        ConfigurationError: The text is malformed.
    """
    faults = []
    converters: dict[str, Callable[[str], Any]] = {"rank": int, "step": int, "phase": str}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        kind, _, rest = part.partition(":")
        settings: dict[str, Any] = {}
        for setting in filter(None, rest.split(",")):
            name, _, value = setting.partition("=")
            try:
                settings[name.strip()] = converters[name.strip()](value.strip())
            except (KeyError, ValueError):
                raise ConfigurationError(
                    f"--inject {part!r}: {setting!r} is malformed; write kind:rank=1,step=7, optionally with "
                    f"phase={'|'.join(PHASES)}."
                ) from None
        if not {"rank", "step"} <= settings.keys():
            raise ConfigurationError(f"--inject {part!r}: rank= and step= are needed, as in kill:rank=1,step=7.")
        faults.append(Fault(kind.strip(), **settings))
    if not faults:
        raise ConfigurationError(f"--inject {text!r}: there is no fault in it; write one, as in kill:rank=1,step=7.")
    return faults


def install(faults: str | Sequence[Fault], *, rank: int) -> Callable[[], None]:
    """Inject the faults of this rank into this process.

    Args:
        faults: The faults of all ranks, as text or as `Fault`s.
        rank: This rank.

    Returns:
        A function that removes the faults.
    """
    wanted = parse_faults(faults) if isinstance(faults, str) else list(faults)
    own = [fault for fault in wanted if fault.rank == rank]
    injector = _Injector(own)
    return injector.remove


class _Injector:
    """Counts steps by torch's global hooks, and causes a fault when its step comes."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._pending = list(faults)
        self._step = 0
        # Steps of each optimizer, as the launcher counts them.
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._depth = 0
        self._handles: list[Any] = []
        if faults:
            self._handles = [
                register_module_forward_pre_hook(self._before_forward),
                register_module_forward_hook(self._after_forward, always_call=True),
                register_optimizer_step_pre_hook(lambda *_: self._strike("optimizer")),
                register_optimizer_step_post_hook(self._after_step),
            ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _before_forward(self, module: torch.nn.Module, _: object) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            self._strike("forward", module)

    def _after_forward(self, module: torch.nn.Module, _: object, output: object) -> None:
        self._depth -= 1
        if self._depth == 0 and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._strike("backward", module))  # type: ignore[no-untyped-call]

    def _after_step(self, optimizer: Any, *_: object) -> None:
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._step = max(self._step, self._steps[optimizer])

    def _strike(self, phase: str, module: torch.nn.Module | None = None) -> None:
        for fault in [f for f in self._pending if (f.step, f.phase) == (self._step, phase)]:
            self._pending.remove(fault)
            say(f"evenstep: injecting {fault}")
            _perform(fault, module)


def _perform(fault: Fault, module: torch.nn.Module | None) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "raise":
        raise RuntimeError(f"injected: {fault}")
    elif fault.kind == "exit":
        raise SystemExit(0)
    elif fault.kind == "segfault":
        ctypes.string_at(0)
    elif fault.kind == "hang":
        while True:  # a signal ends the call, as a request for stacks does
            ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter lock during a call
    elif module is not None:
        parameter = next(p for p in module.parameters() if p.requires_grad)
        if fault.kind == "drift":
            parameter.data.mul_(1.01)
            return

        def spoil(gradient: Tensor) -> Tensor:
            handle.remove()
            return gradient * float("nan")

        handle = parameter.register_hook(spoil)  # type: ignore[no-untyped-call]
