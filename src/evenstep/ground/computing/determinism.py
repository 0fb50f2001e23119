"""Deterministic torch: all switches that make a rank compute the same bits each time.

Some causes of other bits can't be switched off: `facts` lists everything else that bits are known to depend on.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from evenstep.ground.environment import exported, is_set

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_BACKENDS: tuple[tuple[Any, str, Any], ...] = (
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    (torch.backends.cuda.matmul, "allow_fp16_accumulation", False),
    # No result reads memory that was never written; filling it would cost a pass over every new tensor.
    (torch.utils.deterministic, "fill_uninitialized_memory", False),
)


def switch_on(device: torch.device, *, threads: int) -> Callable[[], None]:
    """Make torch compute deterministically on this rank. Operations that can't do so raise torch's error.

    Args:
        device: The device on which the rank computes.
        threads: CPU threads of an operation. Sums are divided among them, so bits depend on their number.

    Returns:
        A function that restores all settings.
    """
    undo = contextlib.ExitStack()
    if device.type == "cuda" and not is_set(_CUBLAS):
        undo.enter_context(exported({_CUBLAS: ":4096:8"}))  # without it cuBLAS may add in another order each time
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    undo.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest")  # no TF32 on GPUs, no bfloat16 on CPUs
    # `set_flags`, because assignment fails after an import of `torch.testing`. Benchmark mode would choose kernels by
    # timing.
    cudnn: Any = torch.backends.cudnn
    undo.callback(
        cudnn.set_flags,
        _deterministic=cudnn.deterministic,
        _benchmark=cudnn.benchmark,
        _allow_tf32=cudnn.allow_tf32,
        _fp32_precision=None,
    )
    cudnn.set_flags(_deterministic=True, _benchmark=False, _allow_tf32=False, _fp32_precision=None)
    for owner, name, value in _BACKENDS:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    return undo.close


def facts(device: torch.device) -> dict[str, str]:
    """Everything else that bits depend on. The same facts give the same bits.

    Checkpoints contain the facts, so keys never change. `virtual_ranks` has their names in messages.
    """
    found = {
        "cpu": _cpu_model(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "num_threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "onednn": _line_of_build("oneDNN", "MKL-DNN"),
        "blas": _line_of_build("Math Kernel Library", "OpenBLAS", "BLAS_INFO"),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["numpy"] = importlib.metadata.version("numpy")
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return found


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _line_of_build(*words: str) -> str:
    """The line of torch's build settings that has one of some words; "none" if there is none."""
    for line in torch.__config__.show().splitlines():
        if any(word in line for word in words):
            return line.strip(" -")[:160]
    return "none"
