"""What workers and parameter servers keep in memory, and what travels between them: formulas. Pure.

[Note: what lies with workers and servers]

    P   trained parameters     F   frozen ones and module buffers     S   the optimizer's state of all of P
    A   activations            W   workers                            p   the parameters of the server that has the most

               parameters   gradients   optimizer    in passing
    worker     P + F        P           0            what is pushed and what comes back: 2 P
    server     p            W p         S p / P      their mean, and an answer to each worker: (W + 1) p

A server keeps what workers push until it is applied. In "async" that is at once, and in "sync" one answer serves all
workers: there it is less. With `checkpoint=` the first server has a whole model and optimizer besides, and the shares
of all servers while it saves. Tables of `RemoteEmbedding` aren't counted: their rows take memory as they are trained.
"""

from __future__ import annotations

import math

from evenstep.bench.predict.footprint import Footprint, Sizes
from evenstep.errors import ConfigurationError
from evenstep.parameter_servers.layout import plan_division


def server_footprints(sizes: Sizes, num_workers: int, num_servers: int) -> list[Footprint]:
    """What a worker needs, and the server that needs the most; see [Note: what lies with workers and servers].

    Args:
        sizes: Of model, optimizer and a worker's batch.
        num_workers: At least 1.
        num_servers: At least 1.

    Raises:
        ConfigurationError: No such numbers.
    """
    if num_workers < 1 or num_servers < 1:
        raise ConfigurationError(f"{num_workers} workers and {num_servers} servers: at least 1 of each.")
    whole, share = sizes.parameter_bytes, largest_share(sizes, num_servers)
    state = math.ceil(sizes.state_bytes * share / max(1, whole))
    worker = Footprint(
        "worker", num_workers, whole + sizes.fixed_bytes, whole, 0, 2 * whole, sizes.activation_bytes, {}, num_servers
    )
    server = Footprint(
        "server", num_workers, share, num_workers * share, state, (num_workers + 1) * share, 0, {}, num_servers
    )
    return [worker, server]


def largest_share(sizes: Sizes, num_servers: int) -> int:
    """Bytes of the parameters of the server that has the most of them."""
    each = [spec.numel * spec.dtype.itemsize for spec in sizes.parameters]
    return max(sum(each[index] for index in indices) for indices in plan_division(each, num_servers))


def server_lines(sizes: Sizes, num_workers: int, num_servers: int, memory_bytes: int) -> list[str]:
    """For people: whether it fits, and what travels in a step."""
    worker, server = server_footprints(sizes, num_workers, num_servers)
    whole, share = sizes.parameter_bytes, largest_share(sizes, num_servers)
    all_reduce = 2 * whole * (num_workers - 1) / num_workers
    lines = []
    for row in (worker, server):
        fits = "" if row.total <= memory_bytes else f", more than the {_mib(memory_bytes)} that there are"
        lines.append(f"A {row.way} needs {_mib(row.total)}{fits}.")
    lines.append(
        f"With checkpoint= server 0 needs {_mib(whole + sizes.state_bytes)} besides, and twice that while it saves."
    )
    lines.append(
        f"In a step a worker sends {_mib(whole)} and gets as much; for a step of every worker a server gets and sends "
        f"{_mib(num_workers * share)}. An all-reduce sends and gets {_mib(all_reduce)} on each rank."
    )
    return lines


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
