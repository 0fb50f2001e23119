"""What `evenstep run --dry-run` prints: ranks, their command, where they meet, and their output. Pure."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from evenstep.launcher.options.flags import fixed_port, rendezvous_endpoint
from evenstep.launcher.options.resources import RankPlan


def describe(
    args: Namespace, plan: RankPlan, *, num_nodes: int, device: str, python: str, variables: Mapping[str, str | None]
) -> list[str]:
    """The lines that say what a command line starts on this host.

    Args:
        args: Of the command line.
        plan: Ranks of this host.
        num_nodes: The most hosts.
        device: "cpu", "cuda" (a GPU for each rank) or "cuda:0".
        python: The interpreter.
        variables: What every rank gets in its environment, beside its place.
    """
    start = {"module": [python, "-m"], "program": [], "script": [python]}
    kind = "module" if args.module else "program" if args.no_python else "script"
    command = shlex.join([*start[kind], args.training_script, *args.training_script_args])
    rows = {"command": command, "directory": str(Path.cwd()), "hosts": _hosts(args, num_nodes)}
    rows |= {"output": _output(args, plan.num_ranks), "restarts": str(args.max_restarts)}
    rows |= {
        "variables": " ".join(
            f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items()) if value is not None
        )
    }
    lines = [f"{name:<11}{text}" for name, text in rows.items()]
    world_size = plan.num_ranks * num_nodes
    is_placed = num_nodes == 1 or (args.rdzv_backend == "static" and ":" not in args.nnodes)
    for local_rank in range(plan.num_ranks):
        where = f"cuda:{local_rank}" if device == "cuda" else device
        if is_placed:
            rank = (0 if num_nodes == 1 else args.node_rank) * plan.num_ranks + local_rank
            lines.append(f"rank {rank:<6}RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={world_size} on {where}")
        else:  # ranks are given out when the hosts meet
            lines.append(f"rank ?     LOCAL_RANK={local_rank} WORLD_SIZE={world_size} at most, on {where}")
    return lines


def _hosts(args: Namespace, num_nodes: int) -> str:
    if num_nodes == 1:
        port = fixed_port(args)
        return "this one alone" + ("" if port is None else f", port {port}")
    address, port = rendezvous_endpoint(args)
    which = f"this is node {args.node_rank}" if args.rdzv_backend == "static" else f"run {args.rdzv_id}"
    return f"{args.nnodes}, which meet at {address}:{port}; {which}"


def _output(args: Namespace, num_ranks: int) -> str:
    if args.all_ranks or num_ranks == 1:
        return "terminal"
    where = args.log_dir or "a temporary directory, removed when all went well"
    return f"rank 0 to the terminal, the others to {where}"
