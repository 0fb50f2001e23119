"""`init`: joins the ranks that a launcher started into a world."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh

from evenstep import checks
from evenstep import world as worlds
from evenstep.console import quieten, say
from evenstep.errors import CollectiveTimeoutError, ConfigurationError, MismatchError, UsageError
from evenstep.ground.compat.torch_distributed import abort_process_groups, default_store, keep_groups, reset_group_count
from evenstep.ground.compat.torch_tensors import forget_meshes
from evenstep.ground.computing import determinism, randomness
from evenstep.ground.computing.device import choose_device
from evenstep.ground.computing.virtual_ranks import (
    DEFAULT_VIRTUAL_RANKS,
    VirtualRanks,
    disagreements,
    validate_division,
    validate_mode,
)
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.coordination.mesh import validate_mesh
from evenstep.ground.coordination.rendezvous_store import choose_gloo_interface, open_store
from evenstep.ground.environment import (
    Placement,
    announcement,
    claim_rank,
    current_placement,
    node_identity,
    placement_from_nodes,
)
from evenstep.ground.health import excepthook, heartbeat, peer_heartbeats
from evenstep.ground.health.steps import count_optimizer_steps, validate_roles
from evenstep.ground.health.users_code import warn
from evenstep.transport.backend import backend
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.factory import (
    TRANSPORTS,
    Transports,
    open_between,
    open_shared_memory,
    open_transports,
    validate_transport,
)
from evenstep.transport.local import LocalTransport
from evenstep.transport.shm.transport import SharedMemoryTransport
from evenstep.transport.tree_order import in_tree_order
from evenstep.world import DEFAULT_TIMEOUT_S, LONGEST_TIMEOUT_S, World

_SAME_ARGUMENTS = "Pass the same on all ranks; each rank derives its own random numbers from the seed."


@excepthook.for_users
def init(
    *,
    seed: int | None = None,
    device: str | torch.device | None = None,
    transport: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    quiet: bool = False,
    log_on_all_ranks: bool = False,
    reproducible: bool = False,
    virtual_ranks: int | None = None,
    threads: int | None = None,
    mesh: Mapping[str, int] | DeviceMesh | None = None,
) -> World:
    """Join the ranks that a launcher started; without a launcher, make a world of one.

    Collective: every rank calls this, once. Under `evenstep run`, `evenstep.launch` or `torchrun` the ranks
    rendezvous; without a launcher no process group is made and no port is opened. A process group that the script made
    before is adopted. Use as a context manager, or let it close at exit.

    Args:
        seed: Seeds python, numpy (if installed) and torch, equally on all ranks. From the first training forward on
            every rank but 0 draws numbers of its own. None: nothing is seeded.
        device: "cpu", "cuda" (this rank's own GPU), "cuda:1" (this GPU, which ranks may share); None: as given to
            `evenstep run --device`, else GPUs if there are any.
        transport: "shared memory", "gloo" or "nccl"; None: NCCL if every rank has its own GPU, else shared memory
            between CPU ranks of one node, else Gloo.
        timeout_s: Seconds after which a collective, or a save, gives up on a missing rank.
        quiet: Don't print the line that describes the run.
        log_on_all_ranks: Every rank logs and warns, even if all write to one terminal (`evenstep.launch`, torchrun,
            mpiexec, srun). By default other ranks than 0 show only errors. Under `evenstep run` each rank has its own
            file, and logs everything.
        reproducible: Compute the same bits on any number of ranks: see docs/how-to/reproducible.md. Needs a seed, and
            training loops over `model.microbatches(batch)`.
        virtual_ranks: With `reproducible`: the number of parts in which every global batch is computed, a power of two
            and a multiple of the number of ranks; None: 8.
        threads: With `reproducible`: CPU threads of every rank, which the bits depend on; None: 1.
        mesh: How ranks divide the work: sizes by name, in any order, whose product is the number of ranks. "replicate"
            (all parameters on every rank), "shard" (parameters divided, FSDP2), "tensor" (layers divided), "pipeline"
            (stages). One size may be -1: it is computed from the others. Ranks along "tensor" and "pipeline" get the
            same samples. Or a torch `DeviceMesh` of all ranks with these names. None: every rank has samples of its
            own.

    Returns:
        The world. It is now the current world, which constructors use for `world=None`.

    Raises:
        ConfigurationError: An argument or a launcher's variable is wrong; there are more ranks than GPUs; or a second
            call has other arguments.
        MismatchError: The ranks were given different arguments. Raised on every rank.
        UsageError: A constructor was called before and made or adopted a world; or this process was forked from a rank
            and can't use that rank's connections.
    """
    validate_roles()
    seed = randomness.validate_seed("evenstep.init", seed)
    if transport is not None:
        checks.choice("evenstep.init: transport", transport, TRANSPORTS, otherwise="None to let evenstep choose")
    timeout_s = checks.number("evenstep.init: timeout_s", timeout_s, above=0, most=LONGEST_TIMEOUT_S)
    checks.switch("evenstep.init: quiet", quiet)
    num_cores = os.cpu_count() or 1
    validate_mode(
        reproducible=reproducible, virtual_ranks=virtual_ranks, threads=threads, seed=seed, num_cores=num_cores
    )
    sizes = validate_mesh("evenstep.init: mesh", mesh)
    if reproducible and sizes is not None:
        raise ConfigurationError(
            "evenstep.init: mesh and reproducible exclude each other. A layer that is divided over ranks adds in "
            "another order than a whole layer, so the bits would depend on the mesh. Leave one of the two out."
        )
    arguments: dict[str, object] = {
        "seed": seed,
        "device": None if device is None else str(device),
        "transport": transport,
        "timeout_s": timeout_s,
        "reproducible": reproducible,
        "virtual_ranks": virtual_ranks,
        "threads": threads,
        "mesh": sizes,
    }
    before = worlds.initialised()
    if before is not None:
        if before.is_closed and before.world_size > 1:
            raise UsageError(
                f"evenstep.init: this process was forked from rank {before.rank} of {before.world_size}, whose "
                f"connections it can't use. Start it as a new process (subprocess, or multiprocessing's spawn): that "
                f"makes its own world."
            )
        worlds.validate_is_first()
        made_with = before._init_arguments
        assert made_with is not None
        if made_with == arguments:
            return before
        differing = {k: (made_with[k], v) for k, v in arguments.items() if made_with[k] != v}
        changed = ", ".join(f"{name}={new!r} (was {old!r})" for name, (old, new) in differing.items())
        raise ConfigurationError(
            f"evenstep.init was called before with other arguments: now {changed}. Call it once and pass the world on, "
            f"or close the first world before making another."
        )
    if any(map(_has_own_nccl, worlds.abandoned)):
        _give_up_nccl()
    worlds.close_abandoned()
    if dist.is_initialized():
        world = World.from_process_group(device=device, seed=seed, transport=transport, timeout_s=timeout_s)
    else:
        world = _join(
            current_placement(),
            device=device,
            seed=seed,
            transport=transport,
            timeout_s=timeout_s,
            needs_group=mesh is not None,
        )
    claim_rank()
    if not (log_on_all_ranks or world.is_main or current_placement().launcher == "evenstep run"):
        world._on_close.append(quieten())
    try:
        validate_on_all_ranks(
            world,
            "evenstep.init",
            lambda: {name: value for name, value in arguments.items() if name != "device"},
            advice=_SAME_ARGUMENTS,
        )
        world._init_arguments = arguments
        if mesh is not None:
            world.use_mesh(mesh, what="evenstep.init: mesh")
        if seed is not None:
            randomness.seed_everything(seed)
        if reproducible:
            make_reproducible(world, num_virtual_ranks=virtual_ranks or DEFAULT_VIRTUAL_RANKS, threads=threads or 1)
    except (ConfigurationError, MismatchError):
        world.close()
        raise
    _announce(world, quiet=quiet)
    atexit.register(world.close)
    if _has_own_nccl(world):
        atexit.register(_give_up_after_failure)  # runs before the world is closed
    worlds.set_current(world)
    if heartbeat.current is not None:
        count_optimizer_steps()
    heartbeat.mark(heartbeat.Phase.BETWEEN_STEPS)
    return world


def _join(
    placement: Placement,
    *,
    device: str | torch.device | None,
    seed: int | None,
    transport: str | None,
    timeout_s: float,
    needs_group: bool = False,
) -> World:
    requested = device if device is not None else placement.device
    chosen = choose_device(requested, placement, num_gpus=torch.cuda.device_count())
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    hook_before = excepthook.install(placement)

    def restore_hook() -> None:
        sys.excepthook = hook_before

    if placement.world_size == 1:
        transports = Transports(LocalTransport(), LocalTransport(), timeout_s, transport)
        at_close = [restore_hook]
        if needs_group:  # torch's meshes need a group; a group of one opens no port
            dist.init_process_group(backend.NAME, store=dist.HashStore(), rank=0, world_size=1)
            at_close.insert(0, _destroy_default_group)
        return World(placement, device=chosen, transports=transports, store=None, seed=seed, on_close=at_close)
    # Check before the rendezvous: a rank that raises right after it would close a socket to which others still connect.
    validate_transport(transport, chosen)
    shares_a_gpu = chosen.type == "cuda" and requested is not None and torch.device(requested).index is not None
    speaks_nccl = chosen.type == "cuda" and (transport == "nccl" or (transport is None and not shares_a_gpu))
    choose_gloo_interface(placement)
    try:
        store = open_store(placement, timeout_s)
        shared = open_group(store, placement, chosen, transport, speaks_nccl=speaks_nccl, timeout_s=timeout_s)
    except ConfigurationError:
        raise
    except (RuntimeError, ValueError, CollectiveTimeoutError) as error:
        reset_group_count()
        raise ConfigurationError(_explain_rendezvous(placement, error)) from error
    try:
        transports = transports_of(shared, chosen, transport, timeout_s=timeout_s)
        if placement.makes_store:
            placement = _complete(placement, transports, chosen)
        end_pages = peer_heartbeats.share_pages(partial(exchange, transports.control), placement)
    except ConfigurationError:
        _destroy_default_group()
        raise
    return World(
        placement,
        device=chosen,
        transports=transports,
        store=default_store(),
        seed=seed,
        on_close=[end_pages, _destroy_default_group, restore_hook],
    )


def open_group(
    store: Store,
    placement: Placement,
    device: torch.device,
    transport: str | None,
    *,
    speaks_nccl: bool = False,
    is_for_all: bool = True,
    timeout_s: float,
) -> SharedMemoryTransport | None:
    """Make the process group of some ranks; returns their shared memory, or None if they have none. Collective.

    Args:
        store: The store of these ranks.
        placement: This rank's place among them.
        device: The device of the gradients.
        transport: As in `init`.
        speaks_nccl: The group also gets NCCL.
        is_for_all: The group has all ranks. False: with shared memory no torch group is made, because torch would take
            it for the default group of all ranks.
        timeout_s: Deadline for the arrival of the other ranks, and for each call.
    """
    shared: SharedMemoryTransport | None = None
    is_ours = device.type == "cpu" and transport != "gloo"
    if is_ours and placement.num_nodes == 1:
        shared = open_shared_memory(store, placement.rank, placement.world_size, timeout_s=timeout_s)
        is_ours = shared is not None
    if shared is not None and not is_for_all:
        return shared
    # torch's own Gloo would listen on a port from now on: see [Note: the whole group] in `transport.backend`. Between
    # nodes it would end the process if ranks call with different sizes.
    usual = "cpu:gloo,cuda:nccl" if speaks_nccl else "gloo"
    dist.init_process_group(
        backend=backend.NAME if is_ours else usual,
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if speaks_nccl else None,
        pg_options=None if shared is None else shared.split(),
    )
    return shared


def transports_of(
    shared: SharedMemoryTransport | None, device: torch.device, transport: str | None, *, timeout_s: float
) -> Transports:
    """The transports of the ranks of `open_group`, which has returned `shared`. Collective.

    Raises:
        ConfigurationError: The requested transport is not available. Raised on every rank.
    """
    if shared is not None:
        return Transports(shared, shared.split(), timeout_s, transport)
    return open_transports(transport, device, timeout_s=timeout_s)


def _complete(placement: Placement, transports: Transports, device: torch.device) -> Placement:
    """Add to a placement which ranks share a node; refuse a GPU that two ranks use as their own.

    Only torchrun says reliably which ranks share a node.

    Raises:
        ConfigurationError: Two ranks were given the same GPU, each as its only one. Raised on every rank.
    """
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    seen = exchange(
        transports.control, {"node": node_identity(), "gpu": gpu, "alone": placement.has_one_gpu_of_its_own}
    )
    first_with: dict[tuple[str, str], int] = {}
    for rank, each in enumerate(seen):
        first = first_with.setdefault((each["node"], each["gpu"]), rank)
        if each["gpu"] is not None and each["alone"] and first != rank:
            raise ConfigurationError(
                f"ranks {first} and {rank} were both given the GPU {each['gpu']} as their only one "
                f"(CUDA_VISIBLE_DEVICES). Give each rank its own, show all ranks all GPUs, or pass device='cuda:0' to "
                f"share one."
            )
    by_node = placement_from_nodes([each["node"] for each in seen], placement.rank)
    return replace(placement, node_rank=by_node.node_rank, num_nodes=by_node.num_nodes)


def make_reproducible(world: World, *, num_virtual_ranks: int, threads: int) -> None:
    """Make this world compute, from now on, the same bits as a world of any other size.

    Collective. Rank 0 warns if the ranks' processors or libraries differ.

    Raises:
        ConfigurationError: The virtual ranks can't be divided over the ranks. Raised on all ranks.
    """
    assert world.seed is not None
    validate_division(num_virtual_ranks, world.world_size)
    world._on_close.append(determinism.switch_on(world.device, threads=threads))
    facts = determinism.facts(world.device)
    differences = disagreements(world.exchange(facts))
    if differences and world.is_main:
        warn(
            f"reproducible mode: bits depend on which rank has which virtual rank, because {'; '.join(differences)}.",
        )
    world.virtual_ranks = VirtualRanks(num_virtual_ranks, world.rank, world.world_size, world.seed, facts)
    nodes = world.exchange(node_identity())
    world.transport = in_tree_order(world.transport, nodes, partial(open_between, timeout_s=world.timeout_s))


def _announce(world: World, *, quiet: bool) -> None:
    if quiet or not world.is_main:
        return
    placement = current_placement()
    if placement.remark:
        say(f"evenstep: {placement.remark}")
    if world.why_gloo is not None:
        say(f"evenstep: using Gloo, because there is no shared memory: {world.why_gloo}")
    known = announcement(
        world_size=world.world_size,
        num_nodes=world.num_nodes,
        device=world.device.type,
        num_threads=torch.get_num_threads(),
    )
    line = f"{known}, {world.transport_name}"
    if world.virtual_ranks is not None:
        mode = f"{world.virtual_ranks.num_virtual_ranks} virtual ranks"
        if placement.announced is None:
            line += f", {mode}"
        else:  # the launcher didn't know of reproducible mode, and has printed another number of threads
            threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
            line = f"evenstep: reproducible: {mode}, {threads} per rank in this mode, {world.transport_name}"
    elif known == placement.announced and world.transport_name == _usual_transport(world):
        return  # the launcher has printed the rest of the line
    say(line)


def _usual_transport(world: World) -> str:
    """The transport that such a world gets by default, if it is available."""
    if world.world_size == 1:
        return "local"
    if world.device.type == "cuda":
        return "nccl"
    if world.num_nodes == 1:
        return "shared memory"
    return "gloo" if world.num_nodes == world.world_size else "shared memory + gloo"


def _has_own_nccl(world: World) -> bool:
    """Whether `init` made NCCL's process groups, and so has to end them."""
    return world.transport_name == "nccl" and world._adopted_group is None


def _give_up_after_failure() -> None:
    if worlds.abandoned or getattr(sys, "last_value", None) is not None:
        _give_up_nccl()


def _give_up_nccl() -> None:
    """End the groups of a failed run, without waiting for ranks that may be gone."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        abort_process_groups()


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()


def _explain_rendezvous(placement: Placement, error: Exception) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    advice = "Check that every rank runs, and that nothing else uses the address and port."
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        advice = "The port is taken: choose another with --master-port, or leave it out and let the system choose."
    return f"rank {placement.rank} of {placement.world_size} could not join the others ({text}). {advice}"


def _disown() -> None:
    """Keep a forked child from ending its parent's world, and from reporting that it has ended.

    The child must not collect the parent's garbage either, or release its process groups at the end: both would wait
    for threads that the child doesn't have.
    """
    gc.freeze()
    keep_groups()
    atexit.unregister(_give_up_after_failure)
    world = worlds.initialised()
    if world is not None:
        world.is_closed = True
        world.store = None  # else an exchange in the child would count as one of the rank's, and wait for the others
        world._at_end.clear()


os.register_at_fork(after_in_child=_disown)
