"""Sums in a fixed binary tree over ranks, over transports that add in an order of their own (Gloo, NCCL).

[Note: exchange, add, gather]

Of a vector every rank gets one slice from every other, adds them in tree order, and tells the others the sum: what a
ring sends, in two steps. Where several ranks share a host, that is done inside each host first, and then between the
ranks that have the same slice, one per host, so that every host sends each element once:

                 host A                 host B
             rank 0   rank 1        rank 2   rank 3
    inside   slice 0  slice 1       slice 0  slice 1       of the host's vectors
    between  slice 0 -------------- slice 0
                      slice 1 --------------- slice 1
    inside   gather                 gather

With as many consecutive ranks on each host, a power of two, both steps together are the tree over all ranks.

The second step begins when somebody waits for the first: works are awaited in the same order on all ranks, as they are
launched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.hosts import HostPlan
from evenstep.transport.reduction import plan_tree

_IN_TREE_ORDER = ("local", "shared memory")
_HALF = (torch.float16, torch.bfloat16)

Steps = Generator[Work, None, None]  # what has to be awaited before the next step


def in_tree_order(
    transport: Transport, hosts: Sequence[str], subgroup: Callable[[str, Sequence[int]], Transport]
) -> Transport:
    """A transport that adds in a binary tree over ranks: this one, if it does, or one that stands before it.

    Collective: every rank calls this.

    Args:
        transport: Of ranks whose number is a power of two.
        hosts: Of each rank, on which host it is.
        subgroup: Opens a transport of a name ("gloo", "nccl") between some ranks; called by these ranks alone.
    """
    if transport.name in _IN_TREE_ORDER or getattr(transport, "is_regular", False):
        return transport
    plan = HostPlan(tuple(tuple(r for r, own in enumerate(hosts) if own == host) for host in dict.fromkeys(hosts)))
    levels = [transport]
    if plan.is_regular and 1 < len(plan.hosts) < transport.world_size:
        host, place = plan.place_of(transport.rank)
        name = "gloo" if "gloo" in transport.name else transport.name
        levels = [subgroup(name, plan.hosts[host]), subgroup(name, plan.lane(place))]
    return OrderedTransport(transport, levels)


class OrderedTransport:
    """Adds in tree order; everything else is the transport's behind it. See [Note: exchange, add, gather].

    Args:
        behind: Carries everything; its ranks are this one's.
        levels: What sums go through, one after the other: [all ranks], or [the ranks of this host, those of the other
            hosts with the same place]. A level's ranks are consecutive numbers of the next one's groups.
    """

    def __init__(self, behind: Transport, levels: Sequence[Transport]) -> None:
        self.name = behind.name
        self.rank = behind.rank
        self.world_size = behind.world_size
        self._behind = behind
        self._levels = list(levels)

    # ------------------------------------------------------------------ sums

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`; sums are added in tree order."""
        if op not in ("sum", "mean"):
            return self._behind.all_reduce(tensor, op)
        return _StepByStep(self._all_reduce(tensor.detach().view(-1), op))

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`; sums are added in tree order."""
        if op not in ("sum", "mean"):
            return self._behind.reduce_scatter(out, tensor, op)
        return _StepByStep(self._reduce_scatter(out.detach().view(-1), tensor.detach().view(-1), op))

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """See `Transport.reduce`: an all-reduce."""
        return self.all_reduce(tensor, op)

    def _ready(self, flat: Tensor) -> Tensor:
        """As it travels: 16 bits as 32, so that sums are rounded once; with Gloo what is on a GPU on the CPU."""
        wide = flat.float() if flat.dtype in _HALF else flat
        return wide.cpu() if self.name == "gloo" else wide

    def _all_reduce(self, flat: Tensor, op: Op) -> Steps:
        ready = self._ready(flat)
        yield from self._sum(ready, self._levels)
        if op == "mean":
            ready.div_(self.world_size)
        if ready is not flat:
            flat.copy_(ready)

    def _sum(self, flat: Tensor, levels: Sequence[Transport]) -> Steps:
        if not levels or not flat.numel():
            return
        level, *rest = levels
        short = -flat.numel() % level.world_size
        whole = torch.cat([flat, flat.new_zeros(short)]) if short else flat
        received = torch.empty_like(whole)
        yield level.all_to_all(received, whole)
        mine = _add(received, level.world_size)
        yield from self._sum(mine, rest)
        yield level.all_gather(whole, mine)
        if short:
            flat.copy_(whole[: flat.numel()])

    def _reduce_scatter(self, out: Tensor, flat: Tensor, op: Op) -> Steps:
        # Part number r belongs to rank r, which is place r % m of host r // m: first those of one place together.
        place = self._levels[0].world_size if len(self._levels) > 1 else 1
        mine = self._ready(flat)
        if flat.numel() and place > 1:
            mine = mine.view(-1, place, out.numel()).transpose(0, 1).reshape(-1)
        for level in self._levels if flat.numel() else ():
            received = torch.empty_like(mine)
            yield level.all_to_all(received, mine)
            mine = _add(received, level.world_size)
        out.copy_(mine.div_(self.world_size) if op == "mean" else mine)

    # ------------------------------------------------------------------ the rest

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`."""
        return self._behind.allocate(numel, dtype=dtype, device=device)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`."""
        return self._behind.broadcast(tensor, src)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        return self._behind.all_gather(out, tensor)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """See `Transport.gather`."""
        return self._behind.gather(out, tensor, dst)

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """See `Transport.scatter`."""
        return self._behind.scatter(out, tensor, src)

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """See `Transport.all_to_all`."""
        return self._behind.all_to_all(out, tensor, out_splits, splits)

    def barrier(self) -> Work:
        """See `Transport.barrier`."""
        return self._behind.barrier()

    def split(self) -> Transport:
        """See `Transport.split`."""
        behind = self._behind.split()
        return OrderedTransport(behind, [behind if each is self._behind else each.split() for each in self._levels])

    def close(self) -> None:
        """See `Transport.close`."""
        for each in (*self._levels, self._behind):
            each.close()

    def __repr__(self) -> str:
        return f"<OrderedTransport of {' and '.join(str(each.world_size) for each in self._levels)}, {self._behind!r}>"


class _StepByStep:
    """A work of several steps. The first is under way; `wait` takes the others."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._next = next(steps, None)

    def wait(self) -> None:
        while self._next is not None:
            self._next.wait()
            self._next = next(self._steps, None)

    def is_completed(self) -> bool:
        return self._next is None


def _add(received: Tensor, num_ranks: int) -> Tensor:
    """The sum of equal parts, in tree order."""
    parts = list(received.view(num_ranks, -1).unbind())
    for a, b in plan_tree(num_ranks):
        parts[a].add_(parts[b])  # parts[a] is memory of `received`, which is nobody else's
    return parts[0]
