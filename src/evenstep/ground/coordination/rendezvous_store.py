"""The rendezvous store, which every rank of a run can reach. Strangers should be kept out.

| started by | store |
| --- | --- |
| `evenstep run`, `evenstep.launch` on one node | a file without a name, made by the launcher; torch's own groups, too |
| `torchrun`, `evenstep run` on several nodes | torch's own, at `MASTER_ADDR` |
| mpiexec, srun | rank 0 listens at an address and a port that every rank derives from the launcher's variables |

In the last case a wrong derivation must be reported: rank 0 checks that the address is its own, and every rank checks
that the store belongs to its job, that the world has the right size, and that no other process claims its rank.
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

from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_distributed import open_debug_stores_by, open_stores_by
from evenstep.ground.environment import Placement, claim_rank, export, is_set, meeting_point, node_identity
from evenstep.ground.host import network
from evenstep.ground.host.processes import state_and_start

_ANSWER_S = 1.0  # time for an answer from a store that was found at the last moment

_Answer = TypeVar("_Answer")

_num_joins = 0
_stores: dict[tuple[str, int], Store] = {}


def open_store(placement: Placement, timeout_s: float) -> Store:
    """Open the store of a run's ranks.

    Collective, because every rank has to call this; returns as soon as the store can be used. Old addresses in the
    store, from a closed world or from before a restart, aren't read again.

    Args:
        placement: This rank's placement.
        timeout_s: Seconds to wait for rank 0, and for values.

    Raises:
        ConfigurationError: Rank 0 wasn't found, ranks of another job use the store, or another process claims this
            rank.
    """
    global _num_joins
    _num_joins += 1
    timeout = timedelta(seconds=timeout_s)
    if placement.rendezvous_file is not None:
        # Don't pass the number of ranks: torch would delete the file when that many ranks have closed it, while others
        # may be opening it for the next world. The file ends with the launcher.
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
    """Make the launcher's file the rendezvous of the script's own process groups, and of torch's debug server.

    The port that a launcher has reserved has no listener until rank 0 of the script opens it. So another user of the
    node could listen there first, and the other ranks would take that process for rank 0.

    Args:
        placement: This rank's placement. If it has no rendezvous file, nothing changes.
    """
    file, place, numbers = placement.rendezvous_file, meeting_point(), itertools.count()
    if file is None:
        return

    def open_store(address: str, port: int, world_size: int) -> Store | None:
        is_theirs = (address, str(port)) == (place.get("MASTER_ADDR"), place.get("MASTER_PORT"))
        if not is_theirs or world_size != placement.world_size:
            return None
        claim_rank()
        # A new name for each group, so that an earlier group's entries aren't read again.
        return PrefixStore(f"torch-{next(numbers)}", FileStore(str(file)))

    open_stores_by(open_store)
    open_debug_stores_by(lambda prefix: PrefixStore(f"torch-debug-{prefix}", FileStore(str(file))))


def choose_gloo_interface(placement: Placement) -> None:
    """Make Gloo listen only on the interface that leads to the other ranks.

    An interface that the user has named is kept. By default Gloo resolves this host's name and uses the resulting
    address: often 127.0.1.1, or one in the wrong network.
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
    # The store lives as long as the process: ranks that close their world and make another one must find the store of
    # rank 0 complete.
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
    """Rank 0's store, as soon as it exists.

    Connects in a separate thread: torch keeps the timeout while no process listens, but waits for ever for a process
    that listens and never answers, such as a stranger on that port.
    """
    call = call_within(
        timeout.total_seconds() + _ANSWER_S,
        lambda: TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False),
    )
    why = "another process listens there, and does not answer as rank 0 would"
    if call.done():
        try:
            return call.result()
        except RuntimeError as error:  # includes torch's DistNetworkError
            why = (str(error).splitlines() or [type(error).__name__])[0]
    raise ConfigurationError(
        f"rank {placement.rank} of {placement.world_size} (started by {placement.launcher}) did not find rank 0 at "
        f"{address}:{port} within {timeout.total_seconds():g} s: {why}. Read the output of rank 0; if rank 0 is "
        f"elsewhere, set "
        f"MASTER_ADDR to its node's address on every rank."
    )


def call_within(timeout_s: float, function: Callable[[], _Answer]) -> Future[_Answer]:
    """Call a function in a thread and wait for its result for a limited time. Returns its future, done or not."""
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
        ConfigurationError: Ranks of another job, or with another number of ranks, use the store.
    """
    mine = {"job": placement.job, "number of ranks": str(placement.world_size)}
    for what, value in mine.items():
        # The first rank to arrive sets the value; a value can't be empty.
        found = store.compare_set(what, "", f"={value}").decode().removeprefix("=")
        if found != value:
            raise ConfigurationError(
                f"rank {placement.rank} of {placement.world_size} met ranks of another job at "
                f"{placement.master_address}:{placement.master_port}: {what} {value!r} here, {found!r} there. Set "
                f"MASTER_PORT to a port that only this job uses, the same on all its ranks."
            )


def _claim_rank(store: Store, placement: Placement) -> None:
    """Check that no other process has joined as this rank: each of the two would get a part of the answers.

    torchrun may reuse a store for restarted ranks; then the earlier process has ended, or ran on another node.

    Raises:
        ConfigurationError: Another process has joined, such as a child of the rank.
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
        f"once. If a rank starts a child before it calls evenstep.init(), and the child calls evenstep.init(), then "
        f"the child is that rank. If ranks of two jobs meet, set MASTER_PORT to a port that only this job uses."
    )
