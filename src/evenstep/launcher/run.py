"""`evenstep run`: many ranks of one script, on torchelastic."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import config_from_args

from evenstep.console import say
from evenstep.errors import EXIT_PREEMPTED, ConfigurationError, PeerLostError
from evenstep.ground import environment
from evenstep.ground.compat import torch_elastic
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.ground.host import network
from evenstep.ground.host.processes import STOP_SIGNALS, stays_ignored
from evenstep.launcher.elastic import rendezvous
from evenstep.launcher.elastic.agent import RankAgent, RunFailed
from evenstep.launcher.failure.report import StopPolicy, status_of
from evenstep.launcher.options.flags import (
    Nodes,
    behind_the_script,
    for_workers,
    handled_signals,
    num_nodes,
    parse,
    placed_by,
    plan_nodes,
)
from evenstep.launcher.options.logs import (
    PREFIX,
    OutputChoices,
    RankLogs,
    make_log_directory,
)
from evenstep.launcher.options.resources import look_at_host, plan_ranks
from evenstep.launcher.spawn.zygote import Zygote, fork_zygote


def run(arguments: Sequence[str], *, may_fork: bool = False) -> int:
    """Run a command line; returns the exit status: the root cause's, or 128 plus the signal that stopped the run.

    Args:
        arguments: The arguments of `evenstep run`.
        may_fork: Whether ranks may be forked from this process; no caller may then catch `BecomeRank` before
            `cli.main`.

    Raises:
        ConfigurationError: The command is wrong; no rank was started.
        BecomeRank: Raised in forked ranks.
    """
    args = parse(arguments)
    _check_target(args)
    flag = behind_the_script(args, arguments)
    if flag is not None:
        script = args.training_script
        warning = f"{flag} comes after {script}, so the script gets it. For evenstep run, write it before the script."
        say(f"evenstep: {warning}")
    # Fork before anything queries GPUs: a process that has initialised CUDA can't be forked.
    may_fork = may_fork and not args.cold_start
    zygote = fork_zygote(preloads=args.max_restarts > 0) if may_fork else None
    try:
        return _run(args, arguments, zygote)
    finally:
        if zygote is not None:
            zygote.close()


def _run(args: Namespace, arguments: Sequence[str], zygote: Zygote | None) -> int:
    most = num_nodes(args)[1]
    around = environment.surroundings()
    environment.refuse_independent_runs(around, num_nodes=most, what="evenstep run")
    args = placed_by(environment.node_of_task(around, num_nodes=most), args, arguments)
    nodes = plan_nodes(args)
    host = look_at_host()
    plan = plan_ranks(
        args.nproc_per_node,
        host,
        threads_per_rank=args.threads_per_rank,
        device=args.device,
        openmp_threads=environment.openmp_threads(),
        servers=args.servers,
    )
    if plan.remark:
        say(f"evenstep: {plan.remark}")
    if args.inject is not None:
        # Import by name, because no module may depend on `testing`. Parse here, so that a mistake is reported once.
        faults = importlib.import_module("evenstep.testing.faults").parse_faults(args.inject)
        num_ranks = most * plan.num_ranks
        beyond = [fault.rank for fault in faults if fault.rank >= num_ranks]
        if beyond:  # else a run without a fault would look like a run that has survived the fault
            raise ConfigurationError(f"--inject: there is no rank {beyond[0]}; there are {num_ranks}, from 0.")
    choices = OutputChoices.parse(
        redirects=args.redirects, tee="3" if args.all_ranks else args.tee, local_ranks_filter=args.local_ranks_filter
    )
    choices.validate_ranks(plan.num_ranks)
    _check_port(nodes)
    timeouts = PhaseTimeouts.parse(args.phase_timeout)
    log_directory = make_log_directory(args.log_dir)
    line = environment.announcement(
        world_size=plan.num_ranks * most,
        num_nodes=most,
        device=(args.device or ("cuda" if host.num_gpus else "cpu")).partition(":")[0],
        num_threads=plan.num_threads,
        fewest_nodes=nodes.fewest,
    )
    say(line)
    variables = environment.run_variables(
        "run",
        num_nodes=most,
        device=args.device,
        announced=line,
        inject=args.inject,
        phase_timeouts=str(timeouts) or None,
        stamps_lines=args.log_dir is not None or None,
        servers=args.servers,
        node_timeout_s=args.node_timeout,
    ) | {"OMP_NUM_THREADS": str(plan.num_threads)}
    if args.secret_file is not None:
        variables |= environment.secret_variable(args.secret_file)
    run = _Run(args, RankLogs(choices, log_directory), timeouts, num_ranks=plan.num_ranks, nodes=nodes, zygote=zygote)
    with environment.exported(variables):
        return run.execute()


class _Run:
    """One run, from its first attempt to its exit status."""

    def __init__(
        self,
        args: Namespace,
        logs: RankLogs,
        timeouts: PhaseTimeouts,
        *,
        num_ranks: int,
        nodes: Nodes,
        zygote: Zygote | None = None,
    ) -> None:
        self._args, self._logs, self._timeouts, self._zygote = args, logs, timeouts, zygote
        self._num_ranks, self._nodes = num_ranks, nodes
        self._agent: RankAgent | None = None

    def execute(self) -> int:
        """Start the ranks, wait until they have ended, and return the exit status."""
        try:
            with _quiet_torchelastic(), _stopped_by(self._args.signals_to_handle):
                self._launch()
        except RunFailed as error:
            return status_of(error.failure)
        except (SignalException, KeyboardInterrupt) as error:
            stopped_by = error.sigval if isinstance(error, SignalException) else signal.SIGINT
            if stopped_by == signal.SIGINT or not self._has_saved:
                what = "interrupted" if stopped_by == signal.SIGINT else f"stopped by {stopped_by.name}"
                say(f"evenstep: {what}; all ranks were stopped")
                return 128 + stopped_by
        except RendezvousError as error:
            cause = error.__cause__ or error
            raise ConfigurationError(
                f"the nodes could not meet at {self._args.rdzv_endpoint or self._nodes.host}: {cause}. Check "
                f"that every node runs the same command, and that the address and port can be reached."
            ) from None
        except DistError as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            say(
                f"evenstep: the node of the store, {self._args.rdzv_endpoint or self._nodes.host}, is gone: {why} "
                f"Start all nodes anew."
            )
            return PeerLostError.exit_code
        finally:
            directory = Path(self._logs.root_log_dir)
            if self._args.log_dir is None and (self._agent is None or not self._agent.left_logs):
                shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # nothing was written, for example after a refused command
                directory.rmdir()
        return EXIT_PREEMPTED if self._has_saved else 0

    @property
    def _has_saved(self) -> bool:
        return self._agent is not None and self._agent.has_saved

    def _launch(self) -> None:
        args, nodes = for_workers(self._args, num_ranks=self._num_ranks, parent_pid=os.getpid()), self._nodes
        if nodes.most > 1:
            args.local_addr = args.local_addr or network.address_towards(nodes.host, nodes.port or 29500)
        try:
            config, command, command_args = config_from_args(args)
            rendezvous.choose(nodes, config)
        except (ValueError, AssertionError) as error:
            raise ConfigurationError(f"evenstep run: {error}") from None
        config.logs_specs = self._logs
        config.signals_to_handle = ""  # `_stopped_by` handles them, already before the rendezvous
        config.log_line_prefix_template = PREFIX
        if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)  # lines of other ranks appear when they are written
        with torch_elastic.processes_started_by(None if self._zygote is None else self._zygote.start_command):
            torch_elastic.launch(self._make_agent, config, command, command_args)

    def _make_agent(self, **kwargs: Any) -> RankAgent:
        args = self._args
        policy = StopPolicy(
            terminate_s=float(args.shutdown_timeout),
            stopped_grace_s=args.stopped_grace,
            node_timeout_s=args.node_timeout,
            poll_every_s=args.monitor_interval,
            name_after_s=args.name_after,
            num_workers=self._num_ranks - args.servers if args.servers else 0,
        )
        self._agent = RankAgent(policy=policy, timeouts=self._timeouts, **kwargs)
        return self._agent


@contextlib.contextmanager
def _stopped_by(names: str) -> Iterator[None]:
    """Context in which signals raise `SignalException`, which stops the run.

    After the first signal, other signals that request a save and stop are ignored: a second signal would end the save
    that the first has begun. Launchers send several: GNU timeout signals the process that it has started, and then this
    process's whole group; Slurm sends the signal that the job has requested, and later SIGTERM. A second Ctrl-C comes
    from a person, and isn't ignored.

    Args:
        names: Names of the signals, separated by commas.
    """
    chosen = [which for which in handled_signals(names) if not stays_ignored(which)]
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if number not in STOP_SIGNALS or not is_asked:
            is_asked = number in STOP_SIGNALS
            raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))

    is_main = threading.current_thread() is threading.main_thread()
    before = {which: signal.signal(which, handle) for which in chosen} if is_main else {}
    try:
        yield
    finally:
        for which, handler in before.items():
            # After the first request this process is about to end, and a second request must not change its status.
            is_over = is_asked and which in STOP_SIGNALS
            signal.signal(which, signal.SIG_IGN if is_over else handler or signal.SIG_DFL)  # None: python didn't set it


@contextlib.contextmanager
def _quiet_torchelastic() -> Iterator[None]:
    """Silence the logs and warnings of torchelastic, unless torch's own variables turn them on."""
    if any(environment.is_set(name) for name in ("TORCH_LOGS", "LOGLEVEL", "TORCH_CPP_LOG_LEVEL")):
        yield
        return
    logger = logging.getLogger("torch.distributed")
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate


def _check_target(args: Namespace) -> None:
    target = args.training_script
    if args.logs_specs is not None:
        raise ConfigurationError("--logs-specs isn't supported. Use --log-dir, --redirects or --tee.")
    if args.module and args.no_python:
        raise ConfigurationError("--module and --no-python exclude each other: a module is run by python.")
    if args.module:
        # Check only the first part of the name: finding a submodule would import its parent here.
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.util.find_spec(target.partition(".")[0])
        finally:
            sys.path.pop(0)
        if found is None:
            raise ConfigurationError(f"no module named {target!r}. Look for a typing error, or leave out -m.")
    elif args.no_python:
        if shutil.which(target) is None:
            raise ConfigurationError(f"{target}: no such program. Give its path, or a name that is on the PATH.")
    elif Path(target).is_dir():
        raise ConfigurationError(f"{target} is a directory. Give the path of a script, or -m and a module.")
    elif not Path(target).exists():
        raise ConfigurationError(f"{target}: no such script (looked in {Path.cwd()}).")


def _check_port(nodes: Nodes) -> None:
    if nodes.port is not None and nodes.rank == 0 and network.is_taken(nodes.host, nodes.port):
        owner = network.owner_of(nodes.port)
        raise ConfigurationError(
            f"port {nodes.port} is in use" + (f" by {owner}" if owner else "") + ". Choose another with --master-port, "
            "or on one host leave it out: the system then chooses a free one."
        )
