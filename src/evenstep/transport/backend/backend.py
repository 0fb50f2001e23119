"""The `torch.distributed` backend "evenstep": CPU ranks of one node exchange through shared memory.

[Note: the whole group]

torch replaces the whole process group by what a Python backend returns, also in "cpu:evenstep,cuda:nccl", and makes no
other backend then. So a group makes and registers its own Gloo and NCCL. Collectives of CPU tensors go over shared
memory; GPU tensors are NCCL's; everything else falls back to Gloo and is counted (`fallback`). The methods that torch
calls for collectives are in `calls`.

[Note: late Gloo]

Gloo listens on a port as long as it lives, and whoever can connect can use up the process's descriptors. So a group
whose ranks share memory makes Gloo with the first call that needs it. Such a call may be a message between two ranks,
and the others may come to none, or wait for those two: they make their Gloo because they are requested to, in a thread
(`shm.requests`), so that no rank waits for what another one's own thread is doing. Gloo can also connect two ranks
alone, with their first message (`lazy_init`). But there, depending on their ports, one waits until the other has a
message for it, too: after `isend` it would not come to a barrier.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from evenstep.console import say
from evenstep.ground.compat.torch_distributed import (
    VISITS_BACKENDS,
    add_backend,
    begin_sequence_numbers,
    is_made,
    loopback_gloo_options,
    set_default_backend,
)
from evenstep.ground.compat.torch_dynamo import uncompiled
from evenstep.transport.backend.calls import GroupCalls
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.core.transport import Transport
from evenstep.transport.factory import connect_ranks
from evenstep.transport.local import LocalTransport
from evenstep.transport.process_group.gloo import connect_gloo
from evenstep.transport.process_group.transport import ProcessGroupTransport
from evenstep.transport.shm.transport import SharedMemoryTransport

NAME = "evenstep"

_POLL_S = 0.1  # between two looks at calls that no thread waits for


def register_backend() -> None:
    """Let `init_process_group("evenstep")` find the backend. Nothing is started. Twice is once."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu", "cuda"])


def _make_group(made_for: Any, options: Any) -> EvenstepGroup:
    is_transport = isinstance(options, SharedMemoryTransport)
    return EvenstepGroup(
        made_for.store,
        made_for.group_rank,
        made_for.group_size,
        timeout=made_for.timeout,
        name=made_for.group_id,
        global_ranks=list(made_for.global_ranks_in_group),
        shared=options if is_transport else None,
        nccl_options=None if is_transport else options,
    )


@uncompiled
class EvenstepGroup(GroupCalls):
    """A process group whose CPU tensors travel through shared memory. torch makes it.

    Collective: every rank of the group makes it, and makes the same calls in the same order.

    Args:
        store: For the rendezvous of the group's ranks.
        rank: This rank.
        size: Number of ranks.
        timeout: Deadline of a call.
        name: The group's name.
        global_ranks: The ranks' numbers in the default group; empty for that one.
        shared: Carries CPU tensors; becomes the group's. None: the ranks connect.
        nccl_options: What the script gave as `pg_options`, if it is for NCCL.
        is_split: Made by `split_group` of another group.

    Attributes:
        why_gloo: Why there is no shared memory, where there is none: then Gloo carries everything.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        name: str,
        global_ranks: list[int],
        shared: SharedMemoryTransport | None = None,
        nccl_options: Any = None,
        is_split: bool = False,
    ) -> None:
        has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
        super().__init__(NAME, rank, size, inner=ProcessGroup(store, rank, size), has_nccl=has_nccl)
        self._store = store
        self._timeout = timeout
        self._name, self._description = name, "undefined"
        self._global_ranks = global_ranks
        self._is_split = is_split
        self._making_gloo = threading.Lock()
        # Counted: torch names a group that follows a destroyed one as that one, whose addresses are in the store.
        self._gloo_prefix = f"gloo {store.add(f'groups of rank {rank}', 1)}/"
        # Held: its python part, which forwards deadlines, would be gone with the last reference from python.
        self._gloo: ForwardingGloo | None = None
        if not VISITS_BACKENDS:
            self._register("cpu", ProcessGroup.BackendType.GLOO, None)
        self._nccl: Any = None
        if has_nccl:
            self._nccl = _make_nccl(store, rank, size, timeout, name, global_ranks, nccl_options)
            self._register("cuda", ProcessGroup.BackendType.NCCL, self._nccl)
        self.why_gloo: str | None = None
        self._shared = shared or self._connect(is_default=not global_ranks)
        if isinstance(self._shared, SharedMemoryTransport):
            self._shared.recorded.name = name
            self._shared.serve_requests(functools.partial(_serve_request, weakref.ref(self)))
        elif size > 1:
            self._need_gloo()

    def _need_gloo(self) -> None:
        """Make Gloo, if there is none yet: see [Note: late Gloo].

        Where ranks share memory, any rank may call this at any time; elsewhere all do, when the group is made.
        """
        with self._making_gloo:
            if self._gloo is not None:
                return
            store, rank, size = PrefixStore(self._gloo_prefix, self._store), self.rank(), self.size()
            if isinstance(self._shared, SharedMemoryTransport):
                self._shared.request()  # first: making it waits for the others
            if isinstance(self._shared, SharedMemoryTransport | LocalTransport):
                gloo = ForwardingGloo(store, rank, size, loopback_gloo_options(self._timeout))
            else:
                gloo = ForwardingGloo(store, rank, size, timeout=self._timeout)
            gloo.options.global_ranks_in_group = self._global_ranks
            gloo.options.group_name = self._name  # type: ignore[assignment]
            begin_sequence_numbers(gloo)
            weak_set_timeout = weakref.WeakMethod(self._set_timeout)
            gloo.on_timeout = lambda timeout: (set_timeout := weak_set_timeout()) and set_timeout(timeout)
            self._register("cpu", ProcessGroup.BackendType.GLOO, gloo)
            # Not before: from torch 2.14 on, a group's rank and size are those of its default backend, if it has one.
            for group in (self._inner, self):
                set_default_backend(group, ProcessGroup.BackendType.GLOO)
            super()._set_group_name(self._name)
            super()._set_group_desc(self._description)
            self._gloo = gloo

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            self._need_gloo()
        return super()._get_backend(device)

    def _set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._shared is not None:
            self._shared.set_timeout(timeout.total_seconds())

    def _register(self, device: str, kind: ProcessGroup.BackendType, backend: Any) -> None:
        for group in (self._inner, self):
            add_backend(group, [device], kind, backend)

    def _connect(self, *, is_default: bool) -> Transport | None:
        if self.size() == 1:
            return LocalTransport()
        timeout_s = self._timeout.total_seconds()
        control = StoreGather(self._store, self.rank(), self.size(), timeout_s=timeout_s)
        made = connect_ranks(control, self._connect_gloo, timeout_s=timeout_s)
        if not isinstance(made, str):
            return made
        self.why_gloo = made
        if is_default and self.rank() == 0:
            say(f"evenstep: Gloo, for want of shared memory: {made}")
        return None

    def _connect_gloo(self, ranks: Sequence[int]) -> ProcessGroupTransport:
        """Gloo between some ranks. Collective among these only."""
        store = PrefixStore(f"among {','.join(map(str, ranks))}/", self._store)
        timeout_s = self._timeout.total_seconds()
        return connect_gloo(store, ranks.index(self.rank()), len(ranks), timeout_s=timeout_s)

    # ------------------------------------------------------------------ what torch calls

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors it carries: the CPU also before there is a Gloo, once torch doesn't visit backends.

        Of a split group torch takes the CPU's backend in any case, on all of its ranks.
        """
        registered: list[torch.device] = super()._device_types
        cpu = torch.device("cpu")
        return registered if cpu in registered or not (self._is_split or is_made(self)) else [cpu, *registered]

    def getBackendName(self) -> str:
        """The backend's name, which `name()` returns too."""
        return NAME

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        if self._shared is None and self._gloo is not None:
            return int(super()._get_sequence_number_for_group())
        return self.num_calls

    def getGroupName(self) -> str:
        """The group's name, which `group_name` is too. torch's own method takes it from Gloo or NCCL."""
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of calls, whatever carries them; under shared memory also of those under way."""
        self._set_timeout(timeout)
        for backend in (self._gloo, self._nccl):
            if backend is not None:
                backend._set_default_timeout(timeout)

    def register_pre_hook(self, hook_id: int, hook: Callable[..., object]) -> None:
        """Refused: torch calls hooks from its own code around C++ backends, which this isn't.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"{self!r} calls no hooks around its collectives. Register them with a group of "
            f"torch.distributed.new_group(backend='gloo')."
        )

    register_post_hook = register_pre_hook

    def getGroupDesc(self) -> str:
        """What the group is for, which `group_desc` is too."""
        return self._description

    def get_group_store(self) -> Store:
        """The store of the group's rendezvous."""
        return self._store

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> EvenstepGroup | None:
        """A group of some of these ranks. Collective: every rank of `new_ranks` calls this; None on others."""
        if self.rank() not in new_ranks:
            return None
        name = group_name or f"{self.group_name}/{','.join(map(str, new_ranks))}"
        group = EvenstepGroup(
            PrefixStore(f"{name}/", self._store),
            new_ranks.index(self.rank()),
            len(new_ranks),
            timeout=timeout or self._timeout,
            name=name,
            global_ranks=[self._global_ranks[rank] for rank in new_ranks] if self._global_ranks else new_ranks,
            is_split=True,
        )
        group._set_group_name(name)
        group._set_group_desc(group_desc or "undefined")
        return group

    def shutdown(self) -> None:
        """Close shared memory and sockets."""
        self._close()
        self._inner.shutdown()

    def abort(self) -> None:
        """Close shared memory and sockets, whatever is in flight."""
        self._close()
        self._inner.abort()

    def _close(self) -> None:
        shared, self._shared = self._shared, None
        self._is_over = True
        if shared is not None:
            shared.close()
        running = [work for work in tuple(self._at_gloo) if not work.is_completed()]
        if running:
            threading.Thread(target=_outlast, args=(running, self._inner), name="evenstep gloo", daemon=True).start()

    def __repr__(self) -> str:
        carrier: object = self._shared if self._shared is not None else self.why_gloo or "closed"
        return f"<EvenstepGroup rank {self.rank()}/{self.size()} {carrier}>"


def _serve_request(group: weakref.ref[EvenstepGroup]) -> None:
    requested = group()
    if requested is not None:
        with contextlib.suppress(RuntimeError):  # this rank's own first call tries again, and raises it there
            requested._need_gloo()


def _outlast(works: Sequence[Any], holder: object) -> None:
    """Hold a group's Gloo until its calls have ended, if only by their deadline.

    The destructor of torch's ProcessGroupGloo waits for them, and `abort` doesn't end them. Where this rank alone has
    made a call, destroying the group would take as long.

    Args:
        works: The calls, which are polled: a thread that waits inside C++ when the interpreter ends
            takes the process with it (std::terminate).
        holder: Keeps Gloo alive.
    """
    while not all(work.is_completed() for work in works):
        time.sleep(_POLL_S)


def _make_nccl(
    store: Store, rank: int, size: int, timeout: timedelta, name: str, global_ranks: list[int], options: Any
) -> Any:
    options_type = dist.ProcessGroupNCCL.Options
    options = options if isinstance(options, options_type) else options_type()
    options._timeout = timeout
    options.global_ranks_in_group = global_ranks
    options.group_name = name
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", store), rank, size, options)
    begin_sequence_numbers(nccl)
    return nccl


class ForwardingGloo(ProcessGroupGloo):
    """Gloo that forwards its deadline to the group's transport.

    torch changes the deadline of a group only at the backends that it knows, Gloo and NCCL.

    Attributes:
        on_timeout: Called with every new deadline; None: nothing is called.
    """

    on_timeout: Callable[[timedelta], object] | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        # Unset meanwhile: inter-node transports set the deadline of this very Gloo again.
        on_timeout, self.on_timeout = self.on_timeout, None
        try:
            if on_timeout is not None:
                on_timeout(timeout)
        finally:
            self.on_timeout = on_timeout
