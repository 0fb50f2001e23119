"""CPU ranks of several hosts: shared memory inside each, Gloo between them, every rank carrying its slice.

[Note: slices and lanes]

An all-reduce over two hosts of two ranks, of a vector of two slices:

                 host A                       host B
             rank 0   rank 1              rank 2   rank 3
    inside   add the host's vectors       add the host's vectors         (shared memory)
    between  slice 0 ------------------------ slice 0                    (lane 0: ranks 0 and 2)
                      slice 1 ------------------------- slice 1          (lane 1: ranks 1 and 3)
    inside   spread the slices            spread the slices              (shared memory)

There are as many lanes as the smallest host has ranks; a rank beyond that carries nothing. Within a lane of h hosts
each rank receives a part of the slice from every other, adds the parts in tree order and tells the others the sum:
2 (h - 1) / h of the vector leaves each host, the least there can be, and the order of summation is fixed. Of two hosts
each sends its slice to the other, which is as much. Two hosts of two ranks let the vector cross once in each direction;
in a ring over the four ranks it crosses 1.5 times.

All of it runs in a thread of the transport, one call after the other, so that the calls of a host's ranks can't mix.
A long vector goes piece by piece: while one piece is on the wire, the next is added inside the host.

What ranks of one host disagree on, shared memory notices. Between hosts every call begins with a message whose size
both know, with the call's fingerprint and a short vector; a longer one follows when all agree, or comes along with the
message where the call was expected (`host_meetings`).

16-bit sums accumulate in 32 bits inside each host and again between them, and are rounded once in the middle.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.errors import EvenstepError, PeerLostError
from evenstep.transport.arguments import Arguments
from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.call_thread import CallThread, QueuedWork
from evenstep.transport.fall_through import fall_through
from evenstep.transport.header import REASON_BYTES, REFUSED, Fingerprint
from evenstep.transport.host_plan import HostPlan
from evenstep.transport.host_steps import HostSteps, Inside
from evenstep.transport.process_group import ProcessGroupTransport

_LAST_WORDS_S = 2.0  # how long who closes waits until the others have heard what it has refused

Steps = Callable[[int, bytes], object]  # given the call's number and fingerprint


class SeveralHostsTransport:
    """Collectives of ranks of which some share a host. Made by `connect_ranks`, not by calling the class.

    Args:
        plan: Which rank is on which host.
        inside: The ranks of this rank's host, in order.
        lane: The ranks that carry the same slice as this one, one per host in order of host; None: it carries nothing.
        everybody: All ranks, for what has no way of its own here. Nobody else uses it.
        rank: This rank.
        timeout_s: Deadline for peers to arrive.
    """

    name = "shared memory + gloo"

    def __init__(
        self,
        plan: HostPlan,
        *,
        inside: Inside,
        lane: ProcessGroupTransport | None,
        everybody: Transport,
        rank: int,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.world_size = plan.world_size
        self.timeout_s = timeout_s
        self._plan = plan
        self._inside = inside
        self._lane = lane
        self._everybody = everybody
        inside.serve(self.memory_ranks)
        if lane is not None:
            lane.known_as = rank
        self._steps = HostSteps(plan, inside, lane, rank=rank, name=self.name)
        self._arguments = Arguments(self.name, rank, self.world_size, refused=weakref.WeakMethod(self.refuse))
        self._refused: QueuedWork | None = None
        self._thread = CallThread("evenstep several hosts", let_go=self._let_go)

    @property
    def is_regular(self) -> bool:
        """Whether every host has equally many, consecutive ranks: sums are then added in a tree over ranks."""
        return self._plan.is_regular

    @property
    def memory_ranks(self) -> Sequence[int]:
        """See `common.ranks_in_reach`: those of this host."""
        return self._plan.hosts[self._plan.place_of(self.rank)[0]]

    # ------------------------------------------------------------------ the seam

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: memory that the ranks of this host share."""
        return self._inside.allocate(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`; also of tensors that aren't contiguous."""
        return self._reduce("all_reduce", tensor, op)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`; also of tensors that aren't contiguous."""
        self._arguments.check_rank("broadcast", "src", src)
        flat, back = self._arguments.flatten(tensor)
        steps = functools.partial(self._steps.broadcast, raw=flat.view(torch.uint8), src=src)
        return self._launch("broadcast", tensor, steps, root=src, back=back)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        self._arguments.check_sizes("all_gather", "out", out, "tensor", tensor)
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        if not self._plan.is_regular:
            return self._by_everybody("all_gather", tensor, lambda to: to.all_gather(into, flat), back=back)
        steps = functools.partial(self._steps.all_gather, out=into.view(torch.uint8), raw=flat.view(torch.uint8))
        return self._launch("all_gather", tensor, steps, back=back)

    def all_gather_over_hosts(self, out: Tensor, tensor: Tensor) -> Work:
        """As `all_gather`, from the ranks that have this one's place on their hosts only; hosts are regular.

        Args:
            out: [number of hosts * n], contiguous.
            tensor: [n], contiguous.
        """
        steps = functools.partial(self._steps.gather_lane, out=out.view(torch.uint8), raw=tensor.view(torch.uint8))
        return self._launch("all_gather", tensor, steps)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`."""
        self._arguments.check_sizes("reduce_scatter", "tensor", tensor, "out", out)
        self._arguments.check_op(op, tensor.dtype)
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        steps = functools.partial(self._steps.reduce_scatter, into=into, flat=flat, op=op)
        return self._launch("reduce_scatter", tensor, steps, op=op, back=back)

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """See `Transport.reduce`."""
        self._arguments.check_rank("reduce", "dst", dst)
        return self._reduce("reduce", tensor, op, root=dst)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """See `Transport.gather`."""
        self._arguments.check_rank("gather", "dst", dst)
        flat, _ = self._arguments.flatten(tensor)
        into, back = None, None
        if dst == self.rank:
            out = self._arguments.require("gather", "out", out)
            self._arguments.check_sizes("gather", "out", out, "tensor", tensor)
            into, back = self._arguments.flatten(out)
        if not self._steps.goes_with_message(flat.nbytes):
            return self._by_everybody("gather", tensor, lambda to: to.gather(into, flat, dst), root=dst, back=back)

        def take(everybodys: Tensor) -> None:
            if into is not None:
                into.view(torch.uint8).copy_(everybodys.view(-1))

        return self._with_message("gather", tensor, flat, take, root=dst, back=back)

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """See `Transport.scatter`."""
        self._arguments.check_rank("scatter", "src", src)
        into, back = self._arguments.flatten(out)
        flat = None
        if src == self.rank:
            tensor = self._arguments.require("scatter", "tensor", tensor)
            self._arguments.check_sizes("scatter", "tensor", tensor, "out", out)
            flat, _ = self._arguments.flatten(tensor)
        num_bytes = self.world_size * into.nbytes
        if not self._steps.goes_with_message(num_bytes):
            return self._by_everybody("scatter", out, lambda to: to.scatter(into, flat, src), root=src, back=back)
        given = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu") if flat is None else flat

        def take(everybodys: Tensor) -> None:
            into.view(torch.uint8).copy_(everybodys[src].view(self.world_size, into.nbytes)[self.rank])

        return self._with_message("scatter", out, given, take, root=src, back=back)

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """See `Transport.all_to_all`."""
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        self._arguments.check_all_to_all(out, tensor, out_splits, splits)
        is_even = out_splits is None or splits is None
        if not is_even or not self._steps.goes_with_message(flat.nbytes):
            alike = tensor if is_even else flat[:0]  # each rank may send another amount
            return self._by_everybody(
                "all_to_all", alike, lambda to: to.all_to_all(into, flat, out_splits, splits), back=back
            )

        def take(everybodys: Tensor) -> None:
            share = into.nbytes // self.world_size
            mine = everybodys.view(self.world_size, self.world_size, share)[:, self.rank]
            into.view(torch.uint8).view(self.world_size, share).copy_(mine)

        return self._with_message("all_to_all", tensor, flat, take, back=back)

    def barrier(self) -> Work:
        """See `Transport.barrier`."""
        return self.announce("barrier")

    def announce(self, collective: str) -> QueuedWork:
        """Have the ranks compare a call that something else carries. The work is done when all make the same one."""
        return self._launch(collective, torch.empty(0, device="cpu"), self._steps.compare)

    def refuse(self, reason: str) -> None:
        """See `SharedMemoryTransport.refuse`."""
        shape = torch.empty(REASON_BYTES, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(EvenstepError):  # of a transport that has failed, or been closed, they know
            self._refused = self._launch(REFUSED, shape, functools.partial(self._steps.refuse, reason=reason))

    def split(self) -> Transport:
        """See `Transport.split`."""
        return SeveralHostsTransport(
            self._plan,
            inside=self._inside.split(),  # type: ignore[arg-type]  # of the same kind
            lane=None if self._lane is None else self._lane.split(),  # type: ignore[arg-type]
            everybody=self._everybody.split(),
            rank=self.rank,
            timeout_s=self.timeout_s,
        )

    def close(self) -> None:
        """See `Transport.close`. What this rank has refused last is told to the others first."""
        if self._refused is not None:
            with contextlib.suppress(EvenstepError):
                self._refused.wait(_LAST_WORDS_S)
        self._thread.close(PeerLostError(f"rank {self.rank}: this {self.name} transport has been closed."))

    def __repr__(self) -> str:
        thread = self._thread
        state = "closed" if thread.is_closed else "failed" if thread.failure else f"{thread.num_calls} calls"
        return f"<SeveralHostsTransport rank {self.rank}/{self.world_size} on {len(self._plan.hosts)} hosts, {state}>"

    # ------------------------------------------------------------------ launching

    def _launch(
        self,
        collective: str,
        tensor: Tensor,
        steps: Steps,
        *,
        op: Op | None = None,
        root: int = -1,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> QueuedWork:
        if back is not None:
            self._arguments.check_written(collective, back[0])
        packed = Fingerprint(collective, op, tensor.dtype, tuple(tensor.shape), root).pack()

        def prepare(number: int) -> Callable[[], None]:
            def run() -> None:
                steps(number, packed)
                if back is not None:
                    back[0].copy_(back[1])

            return run

        return self._thread.submit(f"{collective} over {self.name}", prepare)

    def _reduce(self, collective: str, tensor: Tensor, op: Op, root: int = -1) -> Work:
        self._arguments.check_op(op, tensor.dtype)
        flat, back = self._arguments.flatten(tensor)
        steps = functools.partial(self._steps.all_reduce, flat=flat, op=op)
        return self._launch(collective, tensor, steps, op=op, root=root, back=back)

    def _with_message(
        self,
        collective: str,
        tensor: Tensor,
        flat: Tensor,
        take: Callable[[Tensor], object],
        *,
        root: int = -1,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> Work:
        """What every rank gives goes to all with the first message, and each takes what is its own.

        Args:
            collective: Which.
            tensor: What the ranks compare.
            flat: What this rank gives: as much as every other.
            take: Called with [world_size, bytes].
            root: The rank that gives or gets what no other does.
            back: See `_launch`.
        """

        def steps(number: int, packed: bytes) -> None:
            everybodys = torch.empty(self.world_size * flat.nbytes, dtype=torch.uint8, device="cpu")
            self._steps.all_gather(number, packed, everybodys, flat.view(torch.uint8))
            take(everybodys.view(self.world_size, flat.nbytes))

        return self._launch(collective, tensor, steps, root=root, back=back)

    def _by_everybody(
        self,
        collective: str,
        tensor: Tensor,
        launch: Callable[[Transport], Work],
        *,
        root: int = -1,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> Work:
        """Over Gloo, after the ranks have compared what they call: of other sizes than it expects Gloo can die."""
        fall_through.count(collective)

        def steps(number: int, packed: bytes) -> None:
            self._steps.compare(number, packed)
            launch(self._everybody).wait()

        return self._launch(collective, tensor, steps, root=root, back=back)

    def _let_go(self) -> None:
        # The other ranks of this host notice, and through their lanes those of the other hosts.
        for transport in self.parts:
            transport.close()

    @property
    def parts(self) -> list[Transport]:
        """What it is made of: inside this host, between hosts, and for the rest."""
        return [each for each in (self._inside, self._lane, self._everybody) if each is not None]
