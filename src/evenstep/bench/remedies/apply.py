"""Making changes in the process of a rank, before the script runs: what it imports and calls does something else."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loader import DataLoader
from evenstep.errors import UsageError
from evenstep.observe.patching import Patches
from evenstep.optim.sharded.sharded_optimizer import ShardedOptimizer
from evenstep.replica.wrapper.distributed import DistributedDataParallel


def apply_changes(patches: Patches, changes: Sequence[str], settings: Mapping[str, float]) -> None:
    """Make changes, until the patches are undone.

    Args:
        patches: Undoes them.
        changes: Names of `changes.CHANGES`.
        settings: `num_workers`, `num_threads`, `bucket_cap_mb` of those that have one.
    """
    ways: dict[str, Callable[[], None]] = {
        "backend": lambda: _replace_backend(patches),
        "wrapper": lambda: _replace_wrapper(patches),
        "view": lambda: _set_option(patches, "gradient_as_bucket_view", True),
        "static-graph": lambda: _set_option(patches, "static_graph", True),
        "one-bucket": lambda: _set_option(patches, "bucket_cap_mb", settings["bucket_cap_mb"]),
        "16-bit": lambda: _send_16_bits(patches),
        "fused": lambda: _fuse(patches),
        "sharded": lambda: _shard(patches),
        "workers": lambda: _set_loaders(patches, num_workers=int(settings["num_workers"]), persistent_workers=True),
        "pin-memory": lambda: _set_loaders(patches, pin_memory=True),
        "threads": lambda: _set_threads(patches, int(settings["num_threads"])),
    }
    for name in changes:
        ways[name]()


def _replace_backend(patches: Patches) -> None:
    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
            return original("evenstep", *args, **kwargs)

        return init_process_group

    for module in (dist, dist.distributed_c10d):
        patches.replace(module, "init_process_group", made)


def _replace_wrapper(patches: Patches) -> None:
    for module in (nn.parallel, torch.nn.parallel.distributed):
        patches.replace(module, "DistributedDataParallel", lambda original: DistributedDataParallel)


def _set_option(patches: Patches, option: str, value: object) -> None:
    """Pass an argument to torch's wrapper that the script doesn't."""

    def made(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            kwargs[option] = value
            original(self, *args, **kwargs)

        return init

    for kind in (TorchDistributedDataParallel, DistributedDataParallel):
        patches.replace(kind, "__init__", made)


def _send_16_bits(patches: Patches) -> None:
    def made(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            # torch refuses bf16_compress_hook without a GPU.
            hook = default_hooks.fp16_compress_hook
            if any(parameter.is_cuda for parameter in self.parameters()):
                hook = default_hooks.bf16_compress_hook
            self.register_comm_hook(None, hook)

        return init

    for kind in (TorchDistributedDataParallel, DistributedDataParallel):
        patches.replace(kind, "__init__", made)


def _fuse(patches: Patches) -> None:
    def made(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **{**kwargs, "fused": True, "foreach": None})

        return init

    for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad):
        patches.replace(kind, "__init__", made)


def _shard(patches: Patches) -> None:
    """Put `ShardedOptimizer` in the place of torch's optimizers, and our wrapper in that of torch's."""
    _replace_wrapper(patches)

    def made(kind: type[optim.Optimizer]) -> type[optim.Optimizer]:
        def build(cls: type, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(kind.__init__).bind(None, *args, **kwargs).arguments
            bound = {name: value for name, value in bound.items() if name != "self"}
            params = list(bound.pop("params"))
            return ShardedOptimizer(_model_of(params), kind, params, **bound)

        # Another class than `kind` comes out of it, so python calls no `__init__` afterwards.
        return type(kind.__name__, (kind,), {"__new__": build, "__module__": kind.__module__})

    kinds = [each for each in vars(optim).values() if inspect.isclass(each) and issubclass(each, optim.Optimizer)]
    for kind in kinds:
        if kind is not optim.Optimizer:
            patches.replace(optim, kind.__name__, made)
            patches.replace(sys.modules[kind.__module__], kind.__name__, made)


def _model_of(params: Sequence[Any]) -> DistributedDataParallel:
    """The wrapped model whose parameters an optimizer is given.

    Raises:
        UsageError: There is none yet.
    """
    ids = {
        id(parameter)
        for given in params
        for parameter in (
            given["params"] if isinstance(given, dict) else given if isinstance(given, tuple) else [given]
        )
    }
    # By class: `isinstance` would ask objects that answer in their own way.
    models: list[DistributedDataParallel] = [
        thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)
    ]
    for model in models:
        if any(id(parameter) in ids for parameter in model.parameters()):
            return model
    raise UsageError("the optimizer is made before its model is wrapped: make it afterwards")


def _set_loaders(patches: Patches, **options: object) -> None:
    """Pass arguments to the script's loaders that it doesn't."""

    def made(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if _caller(sys._getframe(1)).startswith("evenstep."):
                original(self, *args, **kwargs)  # the loader inside evenstep's, which has its own workers
                return
            known = {name: value for name, value in options.items() if name in signature.parameters}
            bound = signature.bind(self, *args, **kwargs)
            bound.arguments.update(known)
            original(*bound.args, **bound.kwargs)

        return init

    for kind in (TorchDataLoader, DataLoader):
        patches.replace(kind, "__init__", made)


def _caller(frame: FrameType | None) -> str:
    """The module that made an object, behind those of ours that watch."""
    while frame is not None:
        spec = frame.f_globals.get("__spec__")  # the watching module itself runs as `__main__`
        name: str = frame.f_globals.get("__name__", "") if spec is None else spec.name
        if not name.startswith(("evenstep.bench.", "evenstep.observe.")):
            return name
        frame = frame.f_back
    return ""


def _set_threads(patches: Patches, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    patches.replace(torch, "set_num_threads", lambda original: lambda number: None)
