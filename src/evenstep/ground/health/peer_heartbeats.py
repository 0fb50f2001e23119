"""The heartbeat pages of this node's ranks: made by their launcher or by `init`, and read by the other ranks.

| started by | who makes a rank's page | how ranks find it |
| --- | --- | --- |
| `evenstep run`, `evenstep.launch` | the launcher, before the rank starts | `EVENSTEP_SETTINGS` names its descriptors |
| torchrun, mpiexec, srun | `init` in the rank | ranks exchange their processes and descriptors |

Pages are opened once, through the maker's /proc/PID/fd. No file is left behind, however a rank ends, and no page is
lost if the temporary directory is emptied. The rendezvous store of one node's ranks is such a file, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.ground.environment import Placement, node_identity
from evenstep.ground.health import heartbeat
from evenstep.ground.health.heartbeat import Heartbeat, Page, make_page
from evenstep.ground.health.users_code import user_site

_SITES_S = 1.0

_pages: list[Page] = []  # the pages of this node's ranks


class NodePages:
    """The pages of a node's ranks in one attempt, and their rendezvous file, as made by their launcher.

    Args:
        num_ranks: Number of ranks on this node.

    Attributes:
        pages: The pages, by local rank.
        files: Paths of the pages, by local rank; ranks write their stacks to the same files.
        settings: The `Settings` from which the ranks find their pages.

    Raises:
        OSError: There is no memory for the pages.
    """

    def __init__(self, num_ranks: int) -> None:
        self._fds = [os.memfd_create("evenstep-store", os.MFD_CLOEXEC)]
        try:
            for _ in range(num_ranks):
                self._fds.append(make_page())
            self.pages = [Page(fd) for fd in self._fds[1:]]
        except BaseException:
            self.close()
            raise
        store, *self.files = (f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds)
        self.settings: dict[str, Any] = {"store": store, "pages": self.files}

    def read(self, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
        """The present content of the pages, by rank. `ranks` has the global rank of each local rank."""
        return {rank: page.read() for rank, page in zip(ranks, self.pages, strict=True)}

    def close(self) -> None:
        """Close the files: ranks have mapped theirs. The pages can still be read."""
        while self._fds:
            os.close(self._fds.pop())


def own_page(placement: Placement) -> Page | None:
    """This rank's page, which its launcher reads; None if the launcher made none, or the page can't be opened."""
    if not placement.pages:
        return None
    return heartbeat.current or Page.at(placement.pages[placement.local_rank])


def write_page(placement: Placement) -> Page | None:
    """Write to this rank's page from now on, and read those of the node's other ranks. Returns `own_page`'s result."""
    page = own_page(placement)
    if page is not None and page is not heartbeat.current:
        heartbeat.write_to(page, rank=placement.rank)
        others = (Page.at(path) for path in placement.pages)
        _pages[:] = [other for other in others if other is not None]
    return page


def share_pages(exchange: Callable[[Any], Sequence[Any]], placement: Placement) -> Callable[[], None]:
    """Collective: make the ranks of a host read each other's pages.

    Args:
        exchange: Gives every rank's value to all.
        placement: This rank's placement.

    Returns:
        A function that stops the sharing.
    """
    if placement.pages:
        write_page(placement)
        return lambda: None
    fd = make_page()
    try:
        heartbeat.write_to(Page(fd), rank=placement.rank)
        mine = {"host": node_identity(), "page": f"/proc/{os.getpid()}/fd/{fd}"}
        found = [Page.at(each["page"]) for each in exchange(mine) if each["host"] == mine["host"]]
        _pages[:] = [page for page in found if page is not None]
        exchange(None)  # all ranks have opened the pages
    finally:
        os.close(fd)

    def end() -> None:
        _pages.clear()
        heartbeat.write_to(None)

    return end


def read(pid: int) -> Heartbeat | None:
    """The heartbeat of another rank's process; None if its page is missing."""
    return next((seen for page in _pages if (seen := page.read()) is not None and seen.pid == pid), None)


def read_all() -> dict[int, Heartbeat]:
    """The heartbeats of this host's ranks, by rank."""
    seen = {each.rank: each for page in _pages if (each := page.read()) is not None}
    return dict(sorted(seen.items()))


def exchange_sites(key: str, pids: Mapping[int, int]) -> str:
    """After a disagreement, exchange the ranks' positions in their scripts. Waits a moment for the others.

    Args:
        key: Identifies the call, the same on all ranks.
        pids: The process ids of all ranks, by rank.

    Returns:
        A sentence, the same on all ranks; "" if they have no pages.
    """
    pages = {seen.pid: page for page in _pages if (seen := page.read()) is not None}
    if heartbeat.current is None or any(pid not in pages for pid in pids.values()):
        return ""
    heartbeat.current.write_site(f"{key}\n{user_site()}")
    deadline = time.monotonic() + _SITES_S
    while True:
        said = {rank: _said_of(key, pages[pid]) for rank, pid in sorted(pids.items())}
        if None not in said.values() or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    sites = "; ".join(f"rank {rank}: {where or 'not said'}" for rank, where in said.items())
    return f" They were called here: {sites}."


def _said_of(key: str, page: Page) -> str | None:
    texts = (text.partition("\n") for text in page.sites())
    return next((where for about, _, where in texts if about == key), None)


os.register_at_fork(after_in_child=_pages.clear)
