"""Who am I: rank, size, device, groups, printing, and means over ranks.

A `World` is made by `init` (launched ranks, or one process alone), by `World.from_process_group` (a script that made
its group itself), or by `World.alone`. It holds two transports: `transport` carries gradients, `control` carries
everything else, so that the order of the one never depends on the other.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from evenstep import checks, console, heap, lanes, randomness
from evenstep.device import choose_device, parse_device
from evenstep.environment import Placement, current_placement, host_identity, placement_from_hosts
from evenstep.errors import ConfigurationError, UsageError
from evenstep.health import page
from evenstep.health.telemetry import Telemetry
from evenstep.transport.arguments import validate_group
from evenstep.transport.choice import Transports, open_transports
from evenstep.transport.exchange import broadcast_value, check_mean, check_rows, exchange, gather_rows, weighted_mean
from evenstep.transport.local import LocalTransport
from evenstep.transport.turns import main_first

Item = TypeVar("Item")

DEFAULT_TIMEOUT_S = 600.0
_current: World | None = None


class World:
    """All ranks of a run as one of them sees them. Made by `evenstep.init`, not by calling the class.

    Attributes:
        rank: This rank, 0 to world_size - 1.
        world_size: Number of ranks.
        local_rank, local_world_size: This rank among those of its host, and how many they are.
        node_rank, num_nodes: This host among the hosts, and how many they are.
        device: Where this rank's model and batches live.
        seed: What `init` was given.
        transport: Carries gradients, on `device`.
        control: Carries everything else, on the CPU.
        telemetry: What the steps of the models wrapped in this world spent their time on.
        why_gloo: Why CPU ranks don't share memory, where they would if they could; else None.
        has_diverged: Whether every rank draws random numbers of its own already.
        lanes: In reproducible mode, the lanes of the run; else None.
        stop_reason: Who asked this rank to stop: "SIGTERM", "request_stop()"; None while nobody has.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        device: torch.device,
        transports: Transports,
        store: Store | None,
        seed: int | None = None,
        on_close: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.local_rank, self.local_world_size = placement.local_rank, placement.local_world_size
        self.node_rank, self.num_nodes = placement.node_rank, placement.num_nodes
        self.launcher = placement.launcher
        self.device = device
        self.seed = seed
        self.transport = transports.gradients
        self.control = transports.control
        self.why_gloo = transports.why_gloo
        self._store = store
        self._on_close = list(on_close)
        self.before_close: list[Callable[[], object]] = []  # while peers can still be reached
        self._num_main_first = 0
        self._closed = False
        self._adopted_group: dist.ProcessGroup | None = None
        self.telemetry = Telemetry()
        self._of_groups: dict[dist.ProcessGroup, World] = {}
        self._init_arguments: dict[str, object] | None = None
        self.has_diverged = False
        self.lanes: lanes.Lanes | None = None
        self.stop_reason: str | None = None
        self._at_end: list[Callable[[BaseException | None], object]] = []
        if device.type == "cpu":
            heap.keep_freed_memory()

    @classmethod
    def alone(cls, *, device: str | torch.device | None = None, seed: int | None = None) -> World:
        """A world of one beside whatever else exists: no process group, no port, no effect on the current world.

        Args:
            device: Where to compute; None: the first GPU if there is one, else the CPU.
            seed: Seeds the default order of loaders; nothing is seeded here.

        Raises:
            ConfigurationError: No such device, or no such seed.
        """
        randomness.validate_seed("World.alone", seed)
        chosen = choose_device(device, Placement(), num_gpus=torch.cuda.device_count())
        transports = Transports(LocalTransport(), LocalTransport())
        return cls(Placement(), device=chosen, transports=transports, store=None, seed=seed)

    @classmethod
    def from_process_group(
        cls,
        *,
        device: str | torch.device | None = None,
        seed: int | None = None,
        transport: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> World:
        """Adopt a process group that a script made itself.

        Collective: every rank of the group calls this, or the first thing that needs the current world does. The group
        stays the script's: closing the world leaves it alone.

        Args:
            device: Where this rank computes; None: the current CUDA device if the group speaks NCCL, else the CPU.
            seed: Seeds the default order of loaders; nothing is seeded here.
            transport: As for `evenstep.init`.
            group: The group; None: the default one, with all ranks.

        Raises:
            UsageError: There is no process group, or this rank isn't in it.
            ConfigurationError: The transport can't be had, or another argument is wrong.
        """
        randomness.validate_seed("World.from_process_group", seed)
        validate_group("World.from_process_group: group", group)
        if not dist.is_initialized():
            raise UsageError(
                "there is no process group to adopt. Call evenstep.init() first, or "
                "torch.distributed.init_process_group(...) if the script makes its own."
            )
        if group is not None and dist.get_rank(group) < 0:
            raise UsageError(f"rank {dist.get_rank()} is not in the process group that it was given.")
        speaks_nccl = "nccl" in str(dist.get_backend_config(group))
        usual = torch.device("cuda", torch.cuda.current_device()) if speaks_nccl else "cpu"
        chosen = parse_device(usual if device is None else device)
        transports = open_transports(transport, chosen, timeout_s=DEFAULT_TIMEOUT_S, group=group)
        hosts = exchange(transports.control, host_identity())
        world = cls(
            placement_from_hosts(hosts, dist.get_rank(group)),
            device=chosen,
            transports=transports,
            store=dist.distributed_c10d._get_default_store(),
            seed=seed,
        )
        world._adopted_group = group or dist.group.WORLD
        return world

    # ------------------------------------------------------------------ identity

    @property
    def is_initialised(self) -> bool:
        """Whether `evenstep.init` made this world, and so may move modules and seed random streams."""
        return self._init_arguments is not None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints, logs and writes."""
        return self.rank == 0

    @property
    def transport_name(self) -> str:
        """What carries the gradients: "local", "shared memory", "host memory" (of GPUs), "gloo" or "nccl"."""
        return self.transport.name

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's process group of these ranks; None in a world of one that has none."""
        if self._adopted_group is not None:
            return self._adopted_group
        return dist.group.WORLD if self.world_size > 1 else None

    def of_group(self, group: dist.ProcessGroup | None) -> World:
        """The world of a sub-group's ranks, on this world's device. Collective in the group, the first time.

        Args:
            group: Some of this world's ranks; None or all of them: this world.

        Raises:
            UsageError: This rank isn't in the group.
            ConfigurationError: It is no group.
        """
        validate_group("process_group", group)
        if group is None or group is self.process_group:
            return self
        if group not in self._of_groups:
            world = World.from_process_group(device=self.device, seed=self.seed, group=group)
            self._of_groups[group] = world
            self._on_close.append(world.close)
        return self._of_groups[group]

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<World rank {self.rank}/{self.world_size} on {self.device} over {self.transport_name}{state}>"

    def diverge_random_streams(self) -> None:
        """From now on every rank but 0 draws its own random numbers; once, and only in a world that `init` made."""
        if not self.has_diverged and self.is_initialised and self.lanes is None:
            self.has_diverged = True
            randomness.diverge(self.rank)

    # ------------------------------------------------------------------ talking to people

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """`print` on rank 0, nothing elsewhere."""
        if self.is_main:
            print(*values, sep=sep, end=end, flush=True)  # noqa: T201

    def progress(
        self,
        items: Iterable[Item],
        *,
        description: str | None = None,
        total: int | None = None,
        interval_s: float = 10.0,
    ) -> Iterator[Item]:
        """Iterate with one bar, on rank 0; a plain line per interval where the output is no terminal.

        Args:
            items: What is iterated, on every rank.
            description: What stands before the bar; None: the epoch, if `items` has one.
            total: Number of items; None: `len(items)`, or unknown.
            interval_s: Seconds between two plain lines.

        Raises:
            ConfigurationError: `items` can't be iterated, or another argument makes no sense.
        """
        return console.progress(
            items, description=description, total=total, interval_s=interval_s, is_shown=self.is_main
        )

    # ------------------------------------------------------------------ talking to ranks

    def barrier(self) -> None:
        """Collective: return when every rank has come here."""
        self.control.all_reduce(torch.zeros(1, device="cpu")).wait()

    @overload
    def mean(self, value: float, weight: float | Tensor = 1.0) -> float: ...
    @overload
    def mean(self, value: Tensor, weight: float | Tensor = 1.0) -> Tensor: ...

    def mean(self, value: float | Tensor, weight: float | Tensor = 1.0) -> float | Tensor:
        """The weighted mean over ranks: sum of `weight * value` divided by the sum of `weight`.

        Collective: every rank calls this, in the same order, with values of one shape.

        Args:
            value: A number, or a tensor of any shape (its mean is taken element by element). Ignored, even if it is
                NaN, where the weight is 0.
            weight: Samples, tokens or whatever the value was averaged over on this rank; at least 0.

        Returns:
            A float for a number, else a tensor of `value`'s shape and dtype. NaN if all weights are 0.

        Raises:
            ConfigurationError: The value is no real number or tensor, or the weight isn't one, where it is seen.
        """
        given, weight = check_mean(value, weight, rank=self.rank)
        mean = weighted_mean(self.transport if given.device.type == "cuda" else self.control, given, weight)
        return mean if isinstance(value, Tensor) else float(mean)

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, one after the other along the first dimension, in order of rank.

        Collective: every rank calls this, in the same order.

        Args:
            tensor: [n, ...]; n may differ between ranks and be 0. A 0-dim tensor counts as [1].

        Returns:
            [sum of n, ...], on every rank, on `tensor`'s device. No gradient flows back through it.

        Raises:
            MismatchError: The ranks' dtypes or the shapes behind the first dimension differ. Raised on all ranks.
            ConfigurationError: No dense tensor.
        """
        check_rows(tensor, rank=self.rank)
        carrier = self.transport if tensor.device.type == "cuda" else self.control
        return gather_rows(carrier, self.control, tensor)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s value, on every rank. No pickle travels: JSON and tensors.

        Collective: every rank calls this, in the same order.

        Args:
            value: On rank `src`: None, bool, int, float, str, tensors, and lists, tuples and dictionaries of them.
                Ignored elsewhere.
            src: The rank whose value counts.

        Raises:
            ConfigurationError: The value holds something else, or `src` is no rank. Raised on all ranks.
        """
        if not isinstance(src, int) or isinstance(src, bool) or not 0 <= src < self.world_size:
            raise ConfigurationError(f"broadcast_object: src={src!r}, but ranks are 0 to {self.world_size - 1}.")
        return broadcast_value(self.control, value, src)

    def exchange(self, value: Any, *, what: str = "an exchange of values") -> list[Any]:
        """Every rank's value, in order of rank, on every rank. Collective; the same kinds as `broadcast_object`.

        `what` is told to all ranks where some are at another exchange."""
        return exchange(self.control, value, what=what)

    def main_first(self) -> contextlib.AbstractContextManager[bool]:
        """Rank 0 runs the block first (downloads, prepares); the others wait for it, as long as it takes, and follow.

        Collective. Yields whether this is rank 0. If the block fails on rank 0 it is not run elsewhere.

        Raises:
            UsageError: On the other ranks, when the block raised on rank 0.
        """
        self._num_main_first += 1
        return main_first(self._store, self._num_main_first, is_main=self.is_main)

    # ------------------------------------------------------------------ the end

    def request_stop(self, reason: str = "request_stop()") -> None:
        """Ask all ranks to stop, from any rank, thread or signal handler. At its next steps a `Checkpointer` saves, and
        all ranks end with status 75; `reason`, which is printed then, is a text."""
        checks.text("world.request_stop: reason", reason, wanted="a text that says who asks")
        self.stop_reason = self.stop_reason or reason

    @property
    def store(self) -> Store | None:
        """Where the ranks have met: small texts by key. None in a world of one."""
        return self._store

    def at_end(self, callback: Callable[[BaseException | None], object]) -> None:
        """Call back once the `with` block has ended, with its exception or None; only the store is left then."""
        checks.function("world.at_end: callback", callback)
        self._at_end.append(callback)

    def close(self) -> None:
        """Let go of sockets and groups. Local: waits for nobody. Twice is once."""
        global _current
        if self._closed:
            return
        self._closed = True
        if _current is self:
            _current = None
        for step in (*self.before_close, self.transport.close, self.control.close, *self._on_close):
            step()
        atexit.unregister(self.close)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _current
        if error is None or (isinstance(error, SystemExit) and not error.code):
            page.mark(page.Phase.ENDED)
            self.close()
        elif _current is self:
            # The sockets stay open until this process has said why it ends: peers see the connection break only
            # after that, and so nobody takes a witness for the culprit. Closed at exit, or by the next `init`.
            _current = None
            self.before_close.clear()  # nothing that this rank has promised is kept
            abandoned.append(self)
        while self._at_end:
            self._at_end.pop(0)(error)


abandoned: list[World] = []  # that an exception has left open


def current() -> World:
    """The world that public constructors use when given none.

    The one that `init` made; else the script's own process group, adopted (collective, the first time); else, in a
    process that nobody launched, a world of one.

    Raises:
        UsageError: A launcher started several ranks, and nobody called `init`.
    """
    global _current
    if _current is not None and not _is_stale(_current):
        return _current
    if dist.is_available() and dist.is_initialized():
        _current = World.from_process_group()
        return _current
    placement = current_placement()
    if placement.world_size > 1:
        raise UsageError(
            f"this is rank {placement.rank} of {placement.world_size}, but evenstep.init() has not been called. Call "
            f"it at the start of the script: with evenstep.init() as world: ..."
        )
    _current = World.alone(device=placement.device)
    return _current


def chosen(world: World | None, what: str) -> World:
    """The world that a public constructor (`what`) was given; None: the current one.

    Raises:
        ConfigurationError: No world.
        UsageError: It is closed; or as `current`.
    """
    if world is None:
        return current()
    if not isinstance(world, World):
        raise checks.refuse(f"{what}: world", world, "what evenstep.init() returned, or None for the current world")
    if world._closed:
        raise UsageError(f"{what}: {world!r} was given. Make it before the world's `with` block ends.")
    return world


def identity() -> tuple[int, int]:
    """(rank, world_size), without making or adopting anything: for what only has to know its share."""
    if _current is not None and not _is_stale(_current):
        return _current.rank, _current.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = current()
    return world.rank, world.world_size


def set_current(world: World) -> None:
    """Make a world the one that constructors use; called by `joining.init`."""
    global _current
    _current = world


def initialised() -> World | None:
    """The current world, if there is one already; makes and adopts nothing."""
    return None if _current is None or _is_stale(_current) else _current


def close_abandoned() -> None:
    """Close worlds that an exception has left open."""
    while abandoned:
        abandoned.pop().close()


def _is_stale(world: World) -> bool:
    """Whether a world adopted a group that the script has since destroyed or replaced."""
    if world._adopted_group is None:
        return False
    return not dist.is_initialized() or dist.group.WORLD is not world._adopted_group
