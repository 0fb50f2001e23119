"""torch's own test programs for DistributedDataParallel, played on ranks, with torch's class or with ours in its place.

They lie in torch's wheel (`torch.testing._internal.distributed.distributed_test`) and are imported from there. Most ask
for a GPU per rank, although nothing in them depends on it; here they play on the CPU: what they put on a GPU stays
there, and `device_ids` are left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
import unittest
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.overrides import TorchFunctionMode

import evenstep

MODULE = "torch.testing._internal.distributed.distributed_test"
TIMEOUT_S = 20.0  # of a collective: a rank that failed leaves the others waiting for so long at most


class TorchsOnTheCpu(TorchDistributedDataParallel):
    """torch's class, without GPUs."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **others: Any) -> None:
        super().__init__(module, **others)


class OursOnTheCpu(evenstep.DistributedDataParallel):
    """Ours, without GPUs."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **others: Any) -> None:
        super().__init__(module, **others)


CLASSES = {"torch's": TorchsOnTheCpu, "ours": OursOnTheCpu}


class _OnTheCpu(TorchFunctionMode):
    """Leave on the CPU what a program would put on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.cuda:
            return args[0].clone()
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.ones and args[-2:] == (1000, 1000):
            args = (*args[:-2], 24, 24)  # images of test_ddp_uneven_inputs, which take hours otherwise
        if function is Tensor.to and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **kwargs)


def _is_gpu(device: object) -> bool:
    if isinstance(device, bool) or device is None:
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


def _module_to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    kept = [each for each in args if not _is_gpu(each)]
    kwargs = {name: value for name, value in kwargs.items() if not (name == "device" and _is_gpu(value))}
    return _torchs_module_to(self, *kept, **kwargs) if kept or kwargs else self


_torchs_module_to = nn.Module.to


@functools.cache
def _theirs() -> Any:
    """The module with the programs, whose decorators look for GPUs and the environment when it is imported."""
    from torch.testing._internal import common_distributed

    def everybody_has_one(*_: Any, **__: Any) -> Any:
        return lambda program: program

    replaced = {
        "skip_if_lt_x_gpu": everybody_has_one,
        "nccl_skip_if_lt_x_gpu": everybody_has_one,
        "require_n_gpus_for_nccl_backend": everybody_has_one,
        "skip_if_no_gpu": lambda program: program,
        "init_multigpu_helper": lambda world_size, backend: {rank: [rank] for rank in range(world_size)},
    }
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        for name, instead in replaced.items():
            stack.enter_context(mock.patch.object(common_distributed, name, instead))
        return importlib.import_module(MODULE)


@contextlib.contextmanager
def _environment(num_ranks: int, directory: str) -> Iterator[None]:
    theirs = {"BACKEND": "gloo", "WORLD_SIZE": str(num_ranks), "TEMP_DIR": directory, "MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, theirs):
        yield


def names_of_programs(num_ranks: int, directory: str) -> list[str]:
    """The programs that wrap a model or use `Join`, in the order in which they stand there."""
    with _environment(num_ranks, directory):
        base = _theirs().DistributedTest._DistTestBase
    return [name for name in vars(base) if name.startswith("test_") and _is_meant(base, name, set())]


def _is_meant(base: Any, name: str, seen: set[str]) -> bool:
    """Whether a program, or what it calls, names torch's class or `Join`."""
    seen.add(name)
    try:
        source = inspect.getsource(inspect.unwrap(getattr(base, name)))
    except (OSError, TypeError):
        return False
    if re.search(r"DistributedDataParallel\(|\bDDP\(|\bJoin\(", source):
        return True
    called = set(re.findall(r"self\.(_(?:test|run|prepare)_?\w+)", source)) - seen
    return any(hasattr(base, other) and _is_meant(base, other, seen) for other in called)


def play(name: str, whose: str, num_ranks: int, directory: str) -> tuple[str, str]:
    """On a rank: play one program.

    Args:
        name: Of the program.
        whose: The class that it gets: "torch's" or "ours".
        num_ranks: On so many ranks.
        directory: An empty one, the same on all ranks.

    Returns:
        "passed", "skipped" or "failed"; and why.
    """
    rank = int(os.environ["RANK"])
    with _environment(num_ranks, directory):
        theirs = _theirs()

        class Played(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
            """One program on one rank."""

        if rank == 0:
            for inside in ("barrier", "init_dir", "test_dir"):
                (Path(directory) / inside).mkdir(exist_ok=True)
        case = Played(name)
        case.rank, case.file_name = rank, f"{directory}/store"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        theirs.Barrier.barrier_id = 0
        dist.barrier()
        try:
            with _in_place(CLASSES[whose]):
                getattr(case, name)()
        except unittest.SkipTest as skipped:
            return "skipped", str(skipped)
        except SystemExit as ended:
            return "skipped", f"exit {ended.code}"
        except BaseException:  # a hook of theirs, or torch's own, may raise anything
            return "failed", traceback.format_exc()
        finally:
            dist.destroy_process_group()
    return "passed", ""


@contextlib.contextmanager
def _in_place(wrapper: type) -> Iterator[None]:
    """Put a class in the place of torch's, and the CPU in that of GPUs."""
    of_gpus = {
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "current_device": lambda: 0,
    }
    with contextlib.ExitStack() as stack:
        for holder in (torch.nn.parallel, sys.modules[MODULE]):
            stack.enter_context(mock.patch.object(holder, "DistributedDataParallel", wrapper))
        stack.enter_context(mock.patch.object(nn.Module, "to", _module_to))
        for name, instead in of_gpus.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, instead))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        random = torch.get_rng_state()
        torch.manual_seed(1234)
        stack.callback(torch.set_rng_state, random)
        stack.callback(dist.set_debug_level, dist.get_debug_level())
        with _OnTheCpu():
            yield
