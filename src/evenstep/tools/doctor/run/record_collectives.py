"""Calls that all ranks have to make: collectives, wrappers, the exchange of gradients, and the process group itself."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from evenstep.ground.environment import export, meeting_point
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.tools.doctor.run.recorder import Recorder
from evenstep.tools.observing.patching import Patches

_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


class Collectives:
    """Notes calls that all ranks have to make."""

    def __init__(self, recorder: Recorder, group_made: Callable[[], object]) -> None:
        self._recorder = recorder
        self._group_made = group_made
        self._is_inside = False
        self._launched = meeting_point()
        self._has_spawned = False

    def install(self, patches: Patches) -> None:
        """Watch until the patches are undone."""
        for module in (dist, distributed_c10d):
            for name in _COLLECTIVES:
                patches.replace(module, name, functools.partial(self._collective, name))
            patches.replace(module, "init_process_group", self._making)
            patches.replace(module, "destroy_process_group", self._destroying)
        for kind in (TorchDistributedDataParallel, DistributedDataParallel):
            patches.replace(kind, "__init__", self._wrapping)
        patches.replace(Join, "__enter__", self._joining)
        patches.replace(torch.cuda, "set_device", self._choosing)
        patches.replace(torch.multiprocessing, "spawn", self._spawning)

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return original(*args, **kwargs)
            group = kwargs.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
            return self._inside(name, original, args, kwargs, group=_name_of(group))

        return call

    def _inside(self, op: str, call: Callable[..., Any], args: Any, kwargs: Any, *, group: str = "") -> Any:
        number = self._recorder.enter(op, group=group)
        self._is_inside = True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_inside = False
            self._recorder.leave(number)

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init_process_group(backend: Any = None, init_method: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._is_inside:
                original(backend, init_method, *args, **kwargs)
                return
            by_script = bool(self._recorder.own_file(sys._getframe(1).f_code.co_filename))
            port = self._fixed_port(init_method)
            if port is not None or (self._has_spawned and (init_method or kwargs.get("store") is not None)):
                # Under a launcher with a store of its own the script would wait for one at its own port. And a file or
                # a store that it has made before it started its ranks is another one in each process here.
                init_method = None
                kwargs = {name: value for name, value in kwargs.items() if name not in ("rank", "world_size", "store")}
                export(self._launched)
            self._recorder.note("init", port=port, by_script=by_script)
            self._inside("init_process_group", original, (backend, init_method, *args), kwargs)
            self._group_made()

        return init_process_group

    def _fixed_port(self, init_method: Any) -> str | None:
        """The port that the script has written into itself."""
        if isinstance(init_method, str) and init_method.startswith("tcp://"):
            return init_method.rpartition(":")[2]
        port = meeting_point().get("MASTER_PORT")
        return port if port != self._launched.get("MASTER_PORT") else None

    def _destroying(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def destroy_process_group(*args: Any, **kwargs: Any) -> None:
            if not self._is_inside:
                self._recorder.note("destroy")
            original(*args, **kwargs)

        return destroy_process_group

    def _wrapping(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if self._is_inside:
                original(wrapper, module, *args, **kwargs)
                return
            self._inside("DistributedDataParallel", original, (wrapper, module, *args), kwargs)
            trained = [p for p in module.parameters() if p.requires_grad]
            kind = "evenstep" if isinstance(wrapper, DistributedDataParallel) else "torch"
            self._recorder.note(
                "wrapped",
                wrapper=kind,
                device=str(trained[0].device) if trained else "cpu",
                num_bytes=sum(p.numel() * p.element_size() for p in trained),
            )

        return init

    def _joining(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(join: Any) -> Any:
            self._recorder.note("join")
            return original(join)

        return enter

    def _choosing(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def set_device(device: Any) -> None:
            self._recorder.note("device", device=str(device))
            original(device)

        return set_device

    def _spawning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A script that starts its own ranks is started once a rank here: each goes on as the rank that it is."""

        @functools.wraps(original)
        def spawn(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **named: Any) -> None:
            self._recorder.note("spawns", num_ranks=nprocs)
            self._has_spawned = True
            if nprocs != self._recorder.plan.world_size:
                raise SystemExit(0)
            fn(self._recorder.rank, *args)

        return spawn


def _name_of(group: Any) -> str:
    return "" if group is None or group is dist.GroupMember.WORLD else str(getattr(group, "group_name", ""))
