"""The rendezvous store, which every rank of a run can reach, and no stranger should.

| started by | store |
| --- | --- |
| `evenstep run`, `evenstep.launch` on one node | a file without a name, made by the launcher; torch's own groups, too |
| `torchrun`, `evenstep run` on several nodes | torch's own, at `MASTER_ADDR` |
| mpiexec, srun | rank 0 listens at an address and a port that every rank derives from the launcher's variables |

In the last case a wrong derivation must not end in silence: rank 0 sees whether the address is its own, and every rank
whether the store is its job's, whether the world has its size, and whether another process claims its rank.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from evenstep import network
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_distributed import open_debug_stores_by, open_stores_by
from evenstep.ground.environment import Placement, claim_rank, export, is_set, meeting_point, node_identity
from evenstep.processes import state_and_start

_ANSWER_S = 1.0  # for a store that was found in the last moment

_Answer = TypeVar("_Answer")

_num_joins = 0
_stores: dict[tuple[str, int], Store] = {}


def open_store(placement: Placement, timeout_s: float) -> Store:
    """Open the store of a run's ranks.

    Collective, as every rank has to come here; returns as soon as the store can be used. Addresses that a closed world
    or restarted ranks have left in the store aren't read again.

    Args:
        placement: Who this rank is.
        timeout_s: How long to wait for rank 0, and for values.

    Raises:
        ConfigurationError: No rank 0 is there, or ranks of another job are, or another process is this rank.
    """
    global _num_joins
    _num_joins += 1
    timeout = timedelta(seconds=timeout_s)
    if placement.rendezvous_file is not None:
        # Without the number of ranks: knowing it torch deletes the file when as many have closed it, while others may
        # be opening it for the next world. It goes with the launcher.
        store: Store = FileStore(str(placement.rendezvous_file))
    elif placement.makes_store:
        assert placement.master_address is not None
        assert placement.master_port is not None
        store = _open_own(placement, placement.master_address, placement.master_port, timeout)
    else:
        store = next(rendezvous("env://", timeout=timeout))[0]
    store.set_timeout(timeout)
    joined = PrefixStore(
        f"evenstep-{placement.rendezvous_id}-{_num_joins}" if placement.rendezvous_id else f"evenstep-{_num_joins}",
        store,
    )
    if placement.makes_store:
        _compare(joined, placement)
    _claim_rank(joined, placement)
    return joined


def meet_without_port(placement: Placement) -> None:
    """Have process groups of all ranks that the script makes by torch's own means, and its debug server, use the file.

    Nobody listens on a port that a launcher has reserved until rank 0 of the script does, so another user of the node
    may do so first, and the other ranks would take what it sends for rank 0's.

    Args:
        placement: Of this rank, as its launcher has placed it. Without a file nothing changes.
    """
    file, place, numbers = placement.rendezvous_file, meeting_point(), itertools.count()
    if file is None:
        return

    def open_store(address: str, port: int, world_size: int) -> Store | None:
        is_theirs = (address, str(port)) == (place.get("MASTER_ADDR"), place.get("MASTER_PORT"))
        if not is_theirs or world_size != placement.world_size:
            return None
        claim_rank()
        # Another name for each: what an earlier group has left must not be read again.
        return PrefixStore(f"torch-{next(numbers)}", FileStore(str(file)))

    open_stores_by(open_store)
    open_debug_stores_by(lambda prefix: PrefixStore(f"torch-debug-{prefix}", FileStore(str(file))))


def choose_gloo_interface(placement: Placement) -> None:
    """Let Gloo listen only on the interface that leads to the other ranks.

    An interface that the user has named stays. Without one, Gloo resolves this host's name and takes whatever address
    that gives: often 127.0.1.1, or a wrong network.
    """
    if is_set("GLOO_SOCKET_IFNAME"):
        return
    name: str | None = "lo"
    if placement.num_nodes > 1:
        address = placement.master_address
        own = network.address_towards(address, placement.master_port or 1) if address is not None else None
        name = network.interface_of(own) if own is not None else None
    if name is not None:
        export({"GLOO_SOCKET_IFNAME": name})


def _open_own(placement: Placement, address: str, port: int, timeout: timedelta) -> Store:
    # Kept for the life of the process: ranks that close their world and make another one must not find the store of
    # rank 0 gone, or half gone.
    if (address, port) not in _stores:
        if placement.rank == 0:
            listener = _listen(placement, address, port)
            _stores[address, port] = TCPStore(
                address,
                port,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        else:
            _stores[address, port] = _connect(placement, address, port, timeout)
    return _stores[address, port]


def _connect(placement: Placement, address: str, port: int, timeout: timedelta) -> Store:
    """Rank 0's store, as soon as it is there.

    In a thread of its own: torch keeps to the timeout while no process listens, but waits for ever for one that listens
    and says nothing, as a stranger on that port may.
    """
    call = call_within(
        timeout.total_seconds() + _ANSWER_S,
        lambda: TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False),
    )
    why = "another process listens there, and does not answer as rank 0 would"
    if call.done():
        try:
            return call.result()
        except RuntimeError as error:  # torch's DistNetworkError among them
            why = (str(error).splitlines() or [type(error).__name__])[0]
    raise ConfigurationError(
        f"rank {placement.rank} of {placement.world_size} (started by {placement.launcher}) did not find rank 0 at "
        f"{address}:{port} within {timeout.total_seconds():g} s: {why}. See what rank 0 says; if it is elsewhere, set "
        f"MASTER_ADDR to its node's address on every rank."
    )


def call_within(timeout_s: float, function: Callable[[], _Answer]) -> Future[_Answer]:
    """Call a function in a thread, and await its answer for a while only: the future of it, done or not."""
    call: Future[_Answer] = Future()

    def answer() -> None:
        try:
            call.set_result(function())
        except BaseException as error:
            call.set_exception(error)

    threading.Thread(target=answer, name="evenstep rendezvous", daemon=True).start()
    wait([call], timeout_s)
    return call


def _listen(placement: Placement, address: str, port: int) -> socket.socket:
    bind_to = network.bind_address(address) if placement.num_nodes > 1 else address
    try:
        return network.listen(bind_to, port)
    except OSError as error:
        where = f"{address}:{port}"
        if error.errno == errno.EADDRINUSE:
            owner = network.owner_of(port)
            why = f"port {port} is in use" + (f" by {owner}" if owner else "")
            remedy = "Set MASTER_PORT to a free port, the same on every rank."
        elif error.errno == errno.EADDRNOTAVAIL:
            why = f"rank 0 runs on {socket.gethostname()}, which doesn't have the address {address}"
            remedy = "Set MASTER_ADDR to the address of rank 0's node, the same on every rank."
        else:
            why = error.strerror or str(error)
            remedy = "Set MASTER_ADDR to the address of rank 0's node, the same on every rank."
        raise ConfigurationError(
            f"rank 0 of {placement.world_size} (started by {placement.launcher}) can't listen at {where}: {why}. "
            f"{remedy}"
        ) from None


def _compare(store: Store, placement: Placement) -> None:
    """Check that all ranks in the store belong to one job.

    Raises:
        ConfigurationError: Another job's ranks are here, or another number of them.
    """
    mine = {"job": placement.job, "number of ranks": str(placement.world_size)}
    for what, value in mine.items():
        # The first to come sets it; a value can't be empty.
        found = store.compare_set(what, "", f"={value}").decode().removeprefix("=")
        if found != value:
            raise ConfigurationError(
                f"rank {placement.rank} of {placement.world_size} met ranks of another job at "
                f"{placement.master_address}:{placement.master_port}: {what} {value!r} here, {found!r} there. Set "
                f"MASTER_PORT to a port of this job's own, the same on all its ranks."
            )


def _claim_rank(store: Store, placement: Placement) -> None:
    """Check that no other process has joined as this rank: both would wait for the others, and get halves of answers.

    torchrun may use a store again for ranks that it has started anew; the process before has ended then, or this node
    doesn't know it.

    Raises:
        ConfigurationError: One has, such as a child that the rank has started.
    """
    key, node, own_start = f"rank {placement.rank}", node_identity(), state_and_start(os.getpid())[1]
    mine = f"{os.getpid()} {own_start} {node}"
    found = store.compare_set(key, "", mine).decode()
    if found == mine:
        return
    pid, start_ticks, where = found.split(" ", 2)
    is_here = where == node
    if placement.launcher == "torchrun" and not (is_here and int(start_ticks) >= own_start):
        store.set(key, mine)
        return
    raise ConfigurationError(
        f"two processes say that they are rank {placement.rank} of {placement.world_size} ({placement.why}): pid "
        f"{os.getpid()}, and before it pid {pid}{'' if is_here else ' on ' + where.split(' ')[0]}. Start every rank "
        f"once; a child that a rank starts before it calls evenstep.init() is that rank, if it calls that. Where ranks "
        f"of two jobs meet, set MASTER_PORT to a port of this job's own."
    )
