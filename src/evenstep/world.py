"""`World`: this rank's identity, device and transports, printing, and means over ranks.

A `World` is made by `init` (launched ranks, or one process alone), by `World.from_process_group` (a script that made
its group itself), or by `World.alone`. It holds two transports: `transport` carries gradients, `control` carries
everything else, so that the order of calls over one never depends on the other.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

# Import it before any group exists: later (dynamo imports it with the first AdamW) its functions would hold the group
# as their default argument, and Gloo's threads would still run when python ends. A thread that drops a tensor then
# aborts the process.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from evenstep import checks, console
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.c_library import heap
from evenstep.ground.compat.torch_autograd import has_pending_graph
from evenstep.ground.compat.torch_distributed import default_store
from evenstep.ground.computing import randomness, virtual_ranks
from evenstep.ground.computing.device import choose_device, parse_device
from evenstep.ground.coordination.main_first import main_first
from evenstep.ground.coordination.mesh import DATA, build_mesh, complete_mesh, group_along, validate_mesh
from evenstep.ground.environment import Placement, claim_rank, current_placement, node_identity, placement_from_nodes
from evenstep.ground.health import excepthook, heartbeat
from evenstep.ground.health.telemetry import Telemetry
from evenstep.ground.health.users_code import user_site, warn
from evenstep.transport.core.object_collectives import (
    broadcast_value,
    check_mean,
    check_rows,
    exchange,
    gather_rows,
    weighted_mean,
)
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.core.transport import Transport
from evenstep.transport.core.validation import validate_group
from evenstep.transport.factory import Transports, open_transports
from evenstep.transport.local import LocalTransport

Item = TypeVar("Item")

DEFAULT_TIMEOUT_S = 600.0
LONGEST_TIMEOUT_S = 1e9  # limited by torch's 64 bits of milliseconds, and by python's timedelta
_current: World | None = None
_made_for = ""  # the constructor that made or adopted the current world, because `init` hadn't been called


class World:
    """The ranks of a run, and this rank's place among them. `evenstep.init` makes it.

    Attributes:
        rank: This rank, 0 to world_size - 1.
        world_size: Number of ranks.
        local_rank, local_world_size: This rank's number among the ranks of its node, and their number.
        node_rank, num_nodes: This node's number, and the number of nodes.
        device: The device of this rank's model and batches.
        seed: The seed given to `init`. Loaders without a seed derive theirs from it. A script that chooses its seed
            later sets this, to the same value on every rank.
        transport: Carries gradients, on `device`.
        control: Carries everything else, on the CPU.
        telemetry: The times of steps, by phase: of models wrapped in this world, or in a group of it.
        why_gloo: Why CPU ranks use Gloo although shared memory was preferred; else None.
        timeout_s: Seconds after which a collective, or a save, gives up on a missing rank.
        store: The rendezvous store of the ranks: small texts by key. None in a world of one.
        is_closed: Whether `close` has been called, so that only the store is still open.
        ended_at: The line of the user's code that closed the world: the call, or the `with` block; "" until then.
        channels: Transports in addition to the first two; closed with the world.
        num_orders: Number of loaders with a random order that took their seed from this world; each has its own order.
        has_diverged: Whether evenstep no longer changes the random streams: every rank draws its own numbers or, in an
            adopted world, the streams are the script's.
        virtual_ranks: In reproducible mode, the virtual ranks of the run; else None.
        stop_reason: Why this rank must stop, such as "SIGTERM" or "request_stop()"; None: it needn't.
        mesh: torch's mesh of the ranks, with named dimensions; None: every rank has its own samples.
        data_parallel: The world of the ranks that have the same part of the model and different samples: those along
            "replicate" and "shard". Without a mesh this world itself.
        model_ranks: The world of the ranks that have parts of the same layers: ranks with the same place along
            "pipeline".
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
        self.timeout_s = transports.timeout_s
        self._requested_transport = transports.requested
        self.why_gloo = transports.why_gloo
        self.store = store
        self._on_close = list(on_close)
        self._num_main_first = 0
        self.is_closed, self.ended_at = False, ""
        self.channels: list[Transport] = []
        self.num_orders = 0
        # A weak reference, so that the group ends when the script destroys it: see the import of torch.distributed.nn
        # above.
        self._adopted_group: weakref.ref[dist.ProcessGroup] | None = None
        self.telemetry = Telemetry()
        self._of_groups: dict[dist.ProcessGroup, World] = {}
        self._part_of: World | None = None
        self._init_arguments: dict[str, object] | None = None
        self.has_diverged = False
        self.virtual_ranks: virtual_ranks.VirtualRanks | None = None
        self.stop_reason: str | None = None
        self.mesh: DeviceMesh | None = None
        self.data_parallel: World = self
        self.model_ranks: World = self
        self._at_end: list[Callable[[BaseException | None], object]] = []
        self.before_close: list[Callable[[], object]] = []  # called if the `with` block ends without an error
        if device.type == "cpu":
            heap.keep_freed_memory()

    @classmethod
    @excepthook.for_users
    def alone(cls, *, device: str | torch.device | None = None, seed: int | None = None) -> World:
        """Make a world of one rank, without effect on the current world.

        No process group is made and no port is opened.

        Args:
            device: The device of the rank; None: the first GPU if there is one, else the CPU.
            seed: Seeds the default order of loaders; nothing is seeded here.

        Raises:
            ConfigurationError: There is no such device, or the seed is invalid.
        """
        randomness.validate_seed("World.alone", seed)
        chosen = choose_device(device, Placement(), num_gpus=torch.cuda.device_count())
        transports = Transports(LocalTransport(), LocalTransport(), DEFAULT_TIMEOUT_S)
        return cls(Placement(), device=chosen, transports=transports, store=None, seed=seed)

    @classmethod
    @excepthook.for_users
    def from_process_group(
        cls,
        *,
        device: str | torch.device | None = None,
        seed: int | None = None,
        transport: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | Mapping[str, int] | None = None,
    ) -> World:
        """Adopt a process group that a script made itself.

        Collective: every rank of the group calls this, or makes an object that needs the current world. The script
        still owns the group: closing the world doesn't destroy it.

        Args:
            device: The device of this rank; None: the current CUDA device if the group has NCCL, else the CPU.
            seed: Seeds the default order of loaders; nothing is seeded here.
            transport: As in `evenstep.init`.
            timeout_s: As in `evenstep.init`.
            group: The group; None: the default group, with all ranks.
            mesh: As in `evenstep.init`; only with the default group. The new world then becomes the current world, if
                there is none yet.

        Raises:
            UsageError: There is no process group, or this rank isn't in it.
            ConfigurationError: The transport isn't available, or another argument is wrong.
        """
        sizes = validate_mesh("World.from_process_group: mesh", mesh)
        if sizes is not None and group not in (None, dist.group.WORLD):
            raise ConfigurationError(
                "World.from_process_group: mesh and group exclude each other; a mesh has all ranks."
            )
        randomness.validate_seed("World.from_process_group", seed)
        timeout_s = checks.number("World.from_process_group: timeout_s", timeout_s, above=0, most=LONGEST_TIMEOUT_S)
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
        transports = open_transports(transport, chosen, timeout_s=timeout_s, group=group)
        nodes = exchange(transports.control, node_identity())
        world = cls(
            placement_from_nodes(nodes, dist.get_rank(group)),
            device=chosen,
            transports=transports,
            # The keys of two groups must differ.
            store=default_store() if group is None else PrefixStore(f"evenstep/{group.group_name}", default_store()),
            seed=seed,
        )
        adopted = group or dist.group.WORLD
        assert adopted is not None
        world._adopted_group = weakref.ref(adopted)
        claim_rank()
        if mesh is not None:
            try:
                world.use_mesh(mesh, what="World.from_process_group: mesh")
            except ConfigurationError:
                world.close()
                raise
            if initialised() is None:
                set_current(world)  # else the next constructor would adopt the group again, without the mesh
        return world

    # ------------------------------------------------------------------ identity

    @property
    def is_initialised(self) -> bool:
        """Whether `evenstep.init` made this world, or the world that contains it.

        Only then does evenstep move modules and seed all random streams.
        """
        return self._init_arguments is not None

    @property
    def data_rank(self) -> int:
        """This rank's number among the data ranks, 0 to data_size - 1; see `mesh`.

        Data ranks have different samples.
        """
        return self.data_parallel.rank

    @property
    def data_size(self) -> int:
        """The number of data ranks, which have different samples; see `mesh`."""
        return self.data_parallel.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints, logs and writes."""
        return self.rank == 0

    @property
    def transport_name(self) -> str:
        """Name of the transport that carries the gradients: "local", "shared memory", "gloo" or "nccl"."""
        return self.transport.name

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's process group of these ranks; None in a world of one that has none."""
        if self._adopted_group is not None:
            return self._adopted_group()
        return dist.group.WORLD if self.world_size > 1 else None

    def of_group(self, group: dist.ProcessGroup | None) -> World:
        """The world of a sub-group's ranks. Collective in the group, the first time.

        It has this world's device, transport and timeout.

        Args:
            group: Some of this world's ranks; None or all of them: this world.

        Raises:
            UsageError: This rank isn't in the group.
            ConfigurationError: `group` isn't a process group.
        """
        validate_group("process_group", group)
        if group is None or group is self.process_group:
            return self
        if group not in self._of_groups:
            # The ranks of a group may all be on different nodes. So no transport is requested: shared memory is used if
            # they share a node.
            requested = None if self._requested_transport == "shared memory" else self._requested_transport
            world = World.from_process_group(
                device=self.device,
                seed=self.seed,
                transport=requested,
                timeout_s=self.timeout_s,
                group=group,
            )
            world._init_arguments = self._init_arguments
            world._part_of = self
            world.telemetry = self.telemetry
            self._of_groups[group] = world
            self._on_close.append(world.close)
        return self._of_groups[group]

    def use_mesh(self, mesh: DeviceMesh | Mapping[str, int], *, what: str = "mesh") -> None:
        """Divide the ranks along the dimensions of a mesh.

        Collective. Called once, before any object is made in this world.

        Args:
            mesh: As in `evenstep.init`.
            what: The function and the argument, for messages.

        Raises:
            ConfigurationError: The mesh doesn't fit these ranks. Raised on all ranks.
        """
        sizes = validate_mesh(what, mesh)
        assert sizes is not None
        sizes = complete_mesh(what, sizes, self.world_size)
        self.mesh = build_mesh(mesh, sizes, self.device.type)
        self.data_parallel = self.along(*DATA)
        self.model_ranks = self.along(*DATA, "tensor")
        self.model_ranks.data_parallel = self.data_parallel

    def along(self, *names: str) -> World:
        """The world of the ranks that differ from this rank only along some dimensions of the mesh. Collective.

        Args:
            names: The dimensions; a dimension that the mesh lacks has size 1.
        """
        assert self.mesh is not None
        ranks, group = group_along(self.mesh, names)
        if len(ranks) == self.world_size:
            return self
        if len(ranks) > 1:
            return self.of_group(group)
        alone = World.alone(device=self.device, seed=self.seed)
        alone._init_arguments, alone._part_of, alone.telemetry = self._init_arguments, self, self.telemetry
        return alone

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        return f"<World rank {self.rank}/{self.world_size} on {self.device} over {self.transport_name}{state}>"

    # ------------------------------------------------------------------ random streams: see [Note: replicas' draws]

    def diverge_random_streams(self) -> None:
        """Make every rank except 0 draw its own random numbers from now on. Happens once, and not in reproducible mode.

        In an adopted world this does nothing: the streams are the script's.
        """
        if self.has_diverged or self.virtual_ranks is not None:
            return
        self.has_diverged = True
        if self.is_initialised and not (self._part_of is not None and self._part_of.has_diverged):
            # On a mesh, ranks outside of this part, such as replicas that step independently, draw other numbers, too.
            whole = self if self._part_of is None or self._part_of.mesh is None else self._part_of
            randomness.diverge(whole.data_rank)

    @property
    def draws_alike(self) -> bool:
        """Whether all ranks still draw the same random numbers: no model has been trained yet."""
        return self.is_initialised and self.data_size > 1 and self.virtual_ranks is None and not self.draws_its_own

    @property
    def draws_its_own(self) -> bool:
        """Whether random streams have diverged, for a model of all ranks or of some ranks. Saved in a checkpoint."""
        return self.is_initialised and any(each.has_diverged for each in (self, *self._of_groups.values()))

    @draws_its_own.setter
    def draws_its_own(self, value: bool) -> None:
        """Restore the value that belongs to the restored streams."""
        for world in (self, *self._of_groups.values()):
            world.has_diverged = value

    # ------------------------------------------------------------------ talking to people

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """`print` to standard output on rank 0; other ranks print nothing. For another file, use `world.is_main`."""
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
        """Iterate with a progress bar on rank 0.

        If the output isn't a terminal, a plain line is printed per interval.

        Args:
            items: The objects to iterate over, on every rank.
            description: Text before the bar; None: the epoch, if `items` has one.
            total: Number of items; None: `len(items)`, or unknown.
            interval_s: Seconds between two plain lines.

        Raises:
            ConfigurationError: `items` can't be iterated, or another argument is wrong.
        """
        return console.progress(
            items, description=description, total=total, interval_s=interval_s, is_shown=self.is_main
        )

    # ------------------------------------------------------------------ talking to ranks

    def barrier(self) -> None:
        """Collective: return when every rank has called this."""
        self.control.all_reduce(torch.zeros(1, device="cpu")).wait()

    @overload
    def mean(self, value: float, weight: float | Tensor = 1.0) -> float: ...
    @overload
    def mean(self, value: Tensor, weight: float | Tensor = 1.0) -> Tensor: ...

    def mean(self, value: float | Tensor, weight: float | Tensor = 1.0) -> float | Tensor:
        """The weighted mean over ranks: sum(`weight * value`) / sum(`weight`).

        Collective: every rank calls this, in the same order, with values of one shape. On a mesh, ranks with the same
        samples pass the same value and weight, so that all samples count equally. Ranks without a loss, such as all
        stages of a pipeline except the last, pass the weight 0.

        Args:
            value: A number, or a tensor of any shape (averaged element by element). Ignored if the weight is 0, even if
                it is NaN.
            weight: Number of samples or tokens over which this rank's value was averaged; at least 0.

        Returns:
            A float for a number, else a tensor of `value`'s shape and dtype (float64 for integers and bool). NaN if all
            weights are 0.

        Warns:
            UserWarning: `value` has a gradient that is still to be computed; the mean has none. Once per line of code.

        Raises:
            ConfigurationError: The value isn't a real number or tensor, or the weight isn't a number. Raised on the
                rank that passed it.
        """
        given, weight = check_mean(value, weight, rank=self.rank)
        if isinstance(value, Tensor) and torch.is_grad_enabled() and has_pending_graph(value):
            text = "no gradient flows back through world.mean: a loss that it goes into loses this part"
            warn(f"rank {self.rank}: {text}. Give it a number that is only shown as value.detach().")
        mean = weighted_mean(self.transport if given.device.type == "cuda" else self.control, given, weight)
        return mean if isinstance(value, Tensor) else float(mean)

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' tensors, one after the other along the first dimension, in order of rank.

        Collective: every rank calls this, in the same order. On a mesh, the result has each data rank's tensor once.

        Args:
            tensor: [n, ...]; n may differ between ranks and be 0. A 0-dim tensor counts as [1].

        Returns:
            [sum of n, ...], on every rank, on `tensor`'s device. No gradient flows back through it.

        Raises:
            MismatchError: The ranks' dtypes differ, or their sizes in other dimensions than the first. Raised on all
                ranks.
            ConfigurationError: `tensor` isn't a dense tensor.
        """
        if self.data_parallel is not self:
            return self.data_parallel.gather(tensor)
        check_rows(tensor, rank=self.rank)
        transport = self.transport if tensor.device.type == "cuda" else self.control
        return gather_rows(transport, self.control, tensor)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s value, on every rank. Sent as JSON and tensors, never as a pickle.

        Collective: every rank calls this, in the same order.

        Args:
            value: On rank `src`: None, bool, int, float, str, tensors, and lists, tuples and dictionaries of them.
                Ignored elsewhere.
            src: The rank whose value is sent.

        Raises:
            ConfigurationError: The value contains another type, or `src` isn't a rank. Raised on all ranks.
        """
        if not isinstance(src, int) or isinstance(src, bool) or not 0 <= src < self.world_size:
            raise ConfigurationError(f"broadcast_object: src={src!r}, but ranks are 0 to {self.world_size - 1}.")
        return broadcast_value(self.control, value, src)

    def exchange(self, value: Any, *, what: str = "an exchange of values") -> list[Any]:
        """Every rank's value, in order of rank, on every rank. Collective; takes the same types as `broadcast_object`.

        Args:
            value: This rank's value.
            what: The name of this exchange, for the error that all ranks raise if some ranks make another exchange.
        """
        if self.is_closed and self.store is not None:  # needed for a save at the end
            store = StoreGather(self.store, self.rank, self.world_size, timeout_s=self.timeout_s)
            return exchange(store, value, what=what)
        is_alone = self.is_closed and self.world_size == 1
        return exchange(LocalTransport() if is_alone else self.control, value, what=what)

    def main_first(self) -> contextlib.AbstractContextManager[bool]:
        """Context in which rank 0 runs the block first, such as a download; the other ranks follow.

        They wait as long as that takes.

        Collective. Yields whether this is rank 0. If the block fails on rank 0, it isn't run on the others.

        Raises:
            UsageError: On the other ranks, when the block raised on rank 0.
        """
        self._num_main_first += 1
        return main_first(self.store, self._num_main_first, is_main=self.is_main)

    # ------------------------------------------------------------------ the end

    def request_stop(self, reason: str = "request_stop()") -> None:
        """Request that all ranks stop, from any rank, thread or signal handler.

        A `Checkpointer` saves at one of its next steps, prints `reason`, and ends all ranks with status 75.
        """
        checks.text("world.request_stop: reason", reason, wanted="a text that says why")
        self.stop_reason = self.stop_reason or reason

    def at_end(self, callback: Callable[[BaseException | None], object]) -> None:
        """Register a callback for the end of the `with` block.

        The callback gets the block's exception, or None if the block ended without one or with `sys.exit(0)`. Only the
        world's store is still open then. All callbacks are called, in order of registration, even if one of them
        raises.
        """
        checks.function("world.at_end: callback", callback)
        self._at_end.append(callback)

    def cancel_at_end(self, callback: Callable[[BaseException | None], object]) -> None:
        """Unregister a callback of `at_end`, so that the world no longer keeps it alive. Ignores unknown callbacks."""
        if callback in self._at_end:
            self._at_end.remove(callback)

    def close(self) -> None:
        """Close transports and groups. Local: waits for no other rank. A second call does nothing.

        If something can't be closed, the rest is closed nevertheless, and then the error is raised.
        """
        global _current
        if self.is_closed:
            return
        self.is_closed, self.ended_at = True, user_site()
        if _current is self:
            _current = None
        atexit.unregister(self.close)
        for each in (self.transport, self.control, *self.channels):
            each.ended_at = self.ended_at
        channels = [each.close for each in self.channels]
        _call_all([self.transport.close, self.control.close, *self._on_close, *channels])

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _current
        first: list[Callable[[], object]] = []
        if ended_well(error):
            error = None
            heartbeat.mark(heartbeat.Phase.ENDED)
            first = [*self.before_close, self.close]
        elif _current is self:
            # The sockets stay open until this process has reported why it ends. Peers see the connection break only
            # after that, so no secondary failure looks like the root cause. They are closed at exit, or by the next
            # `init`.
            _current = None
            abandoned.append(self)
        callbacks, self._at_end = self._at_end, []
        _call_all([*first, *(partial(callback, error) for callback in callbacks)])


def ended_well(error: BaseException | None) -> bool:
    """Whether a block that ended with `error` has succeeded; `sys.exit(0)` is a success, too."""
    return error is None or (isinstance(error, SystemExit) and not error.code)


abandoned: list[World] = []  # worlds that an exception has left open


def current(what: str = "") -> World:
    """The world that public constructors use for `world=None`.

    It is the world that `init` made; else the script's own process group, adopted (collective, the first time); else,
    in a process without a launcher, a world of one.

    Args:
        what: The constructor, for messages.

    Raises:
        UsageError: A launcher started several ranks, and `init` wasn't called.
    """
    global _current, _made_for
    if _current is not None and not _is_stale(_current):
        return _current
    if dist.is_available() and dist.is_initialized():
        world = World.from_process_group()
    else:
        world = World.alone(device=_placement_of_one().device)
    _current, _made_for = world, what
    return world


def _placement_of_one() -> Placement:
    """This process's placement, if no launcher started it as one of several ranks.

    Raises:
        UsageError: This process is one of several ranks.
    """
    placement = current_placement()
    if placement.world_size > 1:
        raise UsageError(
            f"this is rank {placement.rank} of {placement.world_size}, but evenstep.init() has not been called. Call "
            f"it at the start of the script: with evenstep.init() as world: ..."
        )
    return placement


def validate_is_first() -> None:
    """Raise UsageError if a constructor has made or adopted the current world: `init` would come too late."""
    world = initialised()
    if world is None or world.is_initialised:
        return
    did = "made a world of one" if world._adopted_group is None else "adopted the script's process group"
    raise UsageError(
        f"evenstep.init on rank {world.rank}: too late, {_made_for or 'a call'} has {did} already ({world!r}), and "
        f"what init is given would be ignored. Call evenstep.init() at the start of the script, before anything of "
        f"evenstep is made; or close that world, as `loader.world.close()` does, and make anew what was made in it."
    )


def chosen(world: World | None, what: str) -> World:
    """The world that was given to a public constructor (`what`); for None, the current world.

    Raises:
        ConfigurationError: `world` isn't a world.
        UsageError: The world is closed; also as in `current`.
    """
    if world is None:
        return current(what)
    if not isinstance(world, World):
        raise checks.refuse(f"{what}: world", world, "what evenstep.init() returned, or None for the current world")
    if world.is_closed:
        raise UsageError(f"{what}: {world!r} was given. Make it before the world's `with` block ends.")
    return world


def identity() -> tuple[int, int]:
    """(data rank, data size), without making or adopting a world: for callers that only compute their share."""
    if _current is not None and not _is_stale(_current):
        return _current.data_rank, _current.data_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    placement = _placement_of_one()
    return placement.rank, placement.world_size


def set_current(world: World) -> None:
    """Make a world the current one, which constructors use; called by `joining.init`."""
    global _current
    _current = world


def initialised() -> World | None:
    """The current world, or None; never makes or adopts a world."""
    return None if _current is None or _is_stale(_current) else _current


def close_abandoned() -> None:
    """Close worlds that an exception has left open."""
    worlds, abandoned[:] = list(abandoned), []
    _call_all([world.close for world in reversed(worlds)])


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call all functions in order, even if one raises. Then print all errors except the first, and raise the first."""
    failures: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            failures.append(error)
    if failures:
        for other in failures[1:]:
            console.say(f"evenstep: then also {type(other).__name__}: {other}")
        raise failures[0]


def _is_stale(world: World) -> bool:
    """Whether a world adopted a group that the script has since destroyed or replaced."""
    if world._adopted_group is None:
        return False
    return not dist.is_initialized() or dist.group.WORLD is not world._adopted_group()
