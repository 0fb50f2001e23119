"""Private parts of `torch.distributed` (torch 2.11 and later).

Everything else that evenstep needs is public: `torch.distributed` has `Store`, `PrefixStore`, `ProcessGroup`,
`ProcessGroupGloo`, `Work` and the options of collectives.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from evenstep.ground.compat.private_names import NOTHING, SEEN, PrivateName

# The store of the default process group, as torch has prefixed it.
default_store = distributed_c10d._get_default_store

# Ends every process group at once. `destroy_process_group` would wait for ranks that may be gone.
abort_process_groups = distributed_c10d._abort_process_group


_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
_create_store = getattr(_rendezvous, "_create_c10d_store", None)


def open_stores_by(open_store: Callable[[str, int, int], dist.Store | None]) -> None:
    """Replace the store of `env://` and `tcp://`, which rank 0 would open at an address and a port.

    Args:
        open_store: Called with address, port and number of ranks; if it returns None, torch opens its own store. A
            later call replaces it.
    """

    def create(hostname: str, port: int, rank: int, world_size: int, *more: Any, **named: Any) -> Any:
        assert _create_store is not None
        return open_store(hostname, port, world_size) or _create_store(hostname, port, rank, world_size, *more, **named)

    if _create_store is not None:
        _rendezvous._create_c10d_store = create


def open_debug_stores_by(open_store: Callable[[str], dist.Store]) -> None:
    """Replace the store in which torch's debug server finds ranks.

    By default that store is at `MASTER_PORT`, where nobody may listen.

    Args:
        open_store: Called with a prefix.
    """

    def client(prefix: str = "debug_server") -> dist.Store:
        return open_store(prefix)

    with contextlib.suppress(ImportError):  # a torch without it
        for module in ("torch.distributed.debug", "torch.distributed.debug._store"):
            found: Any = importlib.import_module(module)
            found.tcpstore_client = client
        # C++ also has a reference to it, and aborts if that is the last reference when python has ended.
        handlers: Any = importlib.import_module("torch.distributed.debug._handlers")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handlers._torch_profile))


def reset_group_count() -> None:
    """Reset torch's count of process groups.

    torch also counts a group that couldn't be made. Then it would look for the next group under another name than the
    other ranks do.
    """
    distributed_c10d._world.group_count = 0


def make_group_alone(ranks: Sequence[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a process group without the other ranks' participation (`use_local_synchronization`).

    Collective: the group's ranks call this, several groups in the same order.

    torch 2.15 names a group after the number of groups that a rank has made, and only members count such a group. If
    one rank has made more of them than another, the next group of all ranks has two names, and the ranks wait for each
    other for ever. So these groups are counted here, and torch's number is restored.

    If the default group is bound to a GPU, torch would split its communicator, in a call that all ranks have to make.
    So the binding is removed meanwhile.

    Args:
        ranks: The members' ranks in the default group.
        backend: The group's backend.
        timeout: Deadline of a call.
    """
    world, members = distributed_c10d._world, tuple(ranks)
    num_made = _num_made_alone.setdefault(world.default_pg, Counter())
    num_made[members] += 1
    counted, world.group_count = world.group_count, _APART + num_made[members]
    default: Any = world.default_pg
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True
        )
    finally:
        world.group_count, default.bound_device_id = counted, bound
    return made


_APART = 10**9  # no script makes so many groups
# The counts are kept per default group: a rank that joins a new default group has made none.
_num_made_alone: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def keep_groups(*groups: dist.ProcessGroup) -> None:
    """Keep process groups for ever in a forked child: these, and those that torch knows by name.

    A group's destructor waits for the group's threads, which only the parent has: the child would hang or be aborted.
    """
    for group in (*groups, *getattr(distributed_c10d._world, "pg_map", ())):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def add_backend(
    group: dist.ProcessGroup, devices: Sequence[str], kind: dist.ProcessGroup.BackendType, backend: Any | None
) -> None:
    """Make a backend carry a group's collectives for tensors of some devices.

    Args:
        group: A group that was made without a backend.
        devices: Types of devices, "cpu" or "cuda".
        kind: The kind of backend.
        backend: A C++ `dist.Backend`; None: only announce to torch that a backend follows (not allowed if torch
            `VISITS_BACKENDS`).
    """
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)


# Whether torch iterates over the backends of a new group, as it does from 2.15 on. A backend that is only announced
# (`add_backend` with None) is an error then.
VISITS_BACKENDS = hasattr(torch._C._distributed_c10d, "HealthCheckHook")


def num_collectives() -> int:
    """The number of calls that all process groups of the script have made so far, on this rank."""
    total = 0
    for group in getattr(distributed_c10d._world, "pg_map", ()):
        with contextlib.suppress(RuntimeError):  # the group's backend doesn't count
            total += group._get_sequence_number_for_group()
    return total


def is_made(group: dist.ProcessGroup) -> bool:
    """Whether torch has finished making a group."""
    return group in distributed_c10d._world.pg_map


def set_default_backend(group: dist.ProcessGroup, kind: dist.ProcessGroup.BackendType) -> None:
    """Choose the backend of a group that carries calls without a device, such as a barrier."""
    group._set_default_backend(kind)


def loopback_gloo_options(timeout: timedelta) -> Any:
    """Options of a Gloo between ranks of one host, which listens only on the loopback interface."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(interface="lo")]
    return options


def begin_sequence_numbers(backend: Any) -> None:
    """Make a backend count its calls. Not needed from torch 2.15 on, where every backend counts from 0."""
    if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):
        backend._set_sequence_number_for_group()


def set_gloo_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Change the deadline of the calls that a group's Gloo carries from now on."""
    backend: Any = group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=timeout_s))


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Context in which new tensors are ordinary tensors, not wrapped by `torch.func.grad` or `vmap`."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # imported already

    return temporarily_clear_interpreter_stack()


# Names that aren't looked up when evenstep is imported.
_C10D = "torch.distributed.distributed_c10d"
_GROUP = "torch.distributed:ProcessGroup"
_GROUPS_FAIL = "no process group can be made"
NAMES = (
    PrivateName(
        "torch.distributed.rendezvous:_create_c10d_store",
        "the store of env:// and tcp://",
        "torch's own groups meet at a port of loopback under evenstep run, too",
    ),
    PrivateName(
        "torch.distributed.debug._store:tcpstore_client",
        "the store in which its debug server finds ranks",
        "under evenstep run it looks for one at a port where nobody listens",
    ),
    PrivateName(
        "torch.distributed.debug._handlers:_torch_profile", "a handler", "under evenstep run ranks can't start"
    ),
    PrivateName(
        "torch._C._distributed_c10d:HealthCheckHook",
        "tells a torch that visits the backends of a new group",
        "no process group can be made, if torch still visits them",
        seen=("2.15",),
    ),
    PrivateName(
        f"{_C10D}:_world.group_count", "how many groups torch has named", "an AttributeError after a failed rendezvous"
    ),
    PrivateName(
        f"{_C10D}:_world.pg_map", "the groups that torch has named", "a forked child may hang or crash at its end"
    ),
    PrivateName(
        f"{_GROUP}._get_sequence_number_for_group",
        "whether a script has made a collective",
        "an AttributeError where gradients stay on a rank",
    ),
    PrivateName(f"{_GROUP}._set_sequence_number_for_group", "lets Gloo count its calls", NOTHING, SEEN[:3]),
    PrivateName(f"{_GROUP}._register_backend", "lets a backend carry some devices' tensors", _GROUPS_FAIL),
    PrivateName(f"{_GROUP}._set_default_backend", "lets a backend carry what has no device", _GROUPS_FAIL),
    *(
        PrivateName(f"torch.distributed:ProcessGroupGloo.{name}", "Gloo between ranks of one host", "no Gloo beside it")
        for name in ("_Options", "_Options._devices", "_Options._timeout", "create_device")
    ),
    *(
        PrivateName(where, "changes the deadline of Gloo's calls", "an AttributeError when a deadline is changed")
        for where in (f"{_GROUP}._get_backend", "torch.distributed:ProcessGroupGloo._set_default_timeout")
    ),
    *(
        PrivateName(where, "tensors outside torch.func's transforms", "an AttributeError in every collective")
        for where in (
            "torch._C._functorch:peek_interpreter_stack",
            "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        )
    ),
)
