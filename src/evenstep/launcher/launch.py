"""`evenstep.launch`: ranks from a function, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from evenstep import checks
from evenstep.console import say
from evenstep.errors import ConfigurationError
from evenstep.ground import environment
from evenstep.ground.health import excepthook
from evenstep.launcher.options.resources import look_at_host, plan_ranks
from evenstep.launcher.pool import RankGroup

Result = TypeVar("Result")


@excepthook.for_users
def launch(
    fn: Callable[..., Result],
    nproc: int = 2,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: str | None = None,
    threads_per_rank: int | None = None,
    timeout_s: float | None = None,
    servers: int = 0,
) -> Result:
    """Call `fn(*args)` on `nproc` ranks of this host, each in its own process, and return rank 0's result.

    `fn` calls `evenstep.init()`; the ranks find each other through a file in memory, and no port is opened. In a
    script, call this under `if __name__ == "__main__":`. A function typed into a notebook needs
    `pip install 'evenstep[notebook]'`.

    The processes end with the call. They also end with the process (and thread) that made the call, however it ends.

    Args:
        fn: The function that every rank runs; it calls `evenstep.init()` to get its rank.
        nproc: Number of ranks.
        args: Arguments of `fn`, equal on all ranks.
        kwargs: Keyword arguments of `fn`.
        device: Default of `evenstep.init(device=...)` in the ranks.
        threads_per_rank: Threads of each rank's CPU operations; None: `OMP_NUM_THREADS`, else the physical cores
            divided by the number of ranks.
        timeout_s: Seconds after which the ranks are stopped; None: no limit.
        servers: Parameter servers beside the ranks, for an `fn` that uses `evenstep.parameter_server`.

    Raises:
        ConfigurationError: An argument is wrong, or `fn` can't be sent; nothing ran.
        RankFailedError: A rank was killed, or ended without an exception that could be sent.
        CollectiveTimeoutError: The ranks were not done in time.
        Exception: The exception of the rank that failed first; the cause has its traceback, and a note has the rank. No
            rank is left running. A user's mistake that isn't caught ends the process with one message and the status of
            `evenstep run`.
    """
    if not callable(fn):
        raise ConfigurationError(
            f"evenstep.launch: {fn!r} can't be called. Pass the function itself: launch(train, 2)."
        )
    who = "evenstep.launch: "
    nproc = checks.whole(f"{who}nproc", nproc, least=1)
    servers = checks.whole(f"{who}servers", servers, least=0)
    if threads_per_rank is not None:
        threads_per_rank = checks.whole(f"{who}threads_per_rank", threads_per_rank, least=1)
    if timeout_s is not None:
        timeout_s = checks.number(f"{who}timeout_s", timeout_s, above=0, finite=False, otherwise="None for no limit")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise checks.refuse(f"{who}kwargs", kwargs, "keyword arguments by name")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ConfigurationError(f"evenstep.launch: args={args!r} isn't a tuple of arguments. Write args=({args!r},).")
    environment.refuse_independent_runs(environment.surroundings(), num_nodes=1, what="evenstep.launch")
    plan = plan_ranks(
        str(nproc),
        look_at_host(),
        threads_per_rank=threads_per_rank,
        device=device,
        openmp_threads=environment.openmp_threads(),
        servers=servers,
    )
    if plan.remark:
        say(f"evenstep: {plan.remark}")
    group = RankGroup(plan.num_ranks, num_threads=plan.num_threads, device=device, servers=servers)
    try:
        result: Result = group.run(fn, args, kwargs, timeout_s=timeout_s, results="first")[0]
        return result
    finally:
        group.close()
