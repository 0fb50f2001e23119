"""`evenstep run`: many ranks of one script, on torchelastic."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args

from evenstep import environment, network
from evenstep.errors import EXIT_PREEMPTED, ConfigurationError
from evenstep.health.budgets import Budgets
from evenstep.launcher import hosts_rendezvous, rendezvous
from evenstep.launcher.account import Failure, status_of, tell
from evenstep.launcher.cores import Host, RankPlan, look_at_host, plan_ranks
from evenstep.launcher.elastic import RankAgent
from evenstep.launcher.logs import PREFIX, RankLogs, Wishes, make_log_directory, tail
from evenstep.launcher.options import (
    behind_the_script,
    fixed_port,
    for_workers,
    meeting_place,
    num_nodes,
    on_one_host,
    on_several_hosts,
    parse,
    placed_by,
)
from evenstep.launcher.starting import copied_from
from evenstep.launcher.template import Template, fork_template
from evenstep.launcher.verdict import RestartLimit, StopPolicy, exit_status


def run(arguments: Sequence[str], *, may_fork: bool = False) -> int:
    """Run a command line and return the exit status: the culprit's, or 128 and the signal that stopped us.

    Args:
        arguments: Those of `evenstep run`.
        may_fork: Ranks may be copies of this process, and the caller lets `BecomeRank` through.

    Raises:
        ConfigurationError: Something in the command is wrong; no rank was started.
        BecomeRank: In the ranks.
    """
    args = parse(arguments)
    _check_target(args)
    flag = behind_the_script(args, arguments)
    if flag is not None:
        script = args.training_script
        told = f"{flag} stands behind {script} and is the script's. For evenstep run, write it before the script."
        print(f"evenstep: {told}", file=sys.stderr, flush=True)  # noqa: T201
    # Before anything asks for GPUs: a process that knows CUDA can't be copied.
    template = fork_template(preloads=args.max_restarts > 0) if may_fork and not args.cold_start else None
    try:
        return _run(args, arguments, template)
    finally:
        if template is not None:
            template.close()


def _run(args: Namespace, arguments: Sequence[str], template: Template | None) -> int:
    fewest, most = num_nodes(args)
    around = environment.surroundings()
    environment.refuse_independent_runs(around, num_nodes=most, what="evenstep run")
    args = placed_by(environment.host_of_task(around, num_nodes=most), args, arguments)
    host = look_at_host()
    plan = plan_ranks(
        args.nproc_per_node,
        host,
        threads_per_rank=args.threads_per_rank,
        device=args.device,
        openmp_threads=environment.openmp_threads(),
    )
    if args.inject is not None:
        # By name: nothing of evenstep stands on what is meant for tests. What is wrong in it is said here, once.
        importlib.import_module("evenstep.testing.faults").parse_faults(args.inject)
    wishes = Wishes.parse(
        redirects=args.redirects, tee="3" if args.all_ranks else args.tee, local_ranks_filter=args.local_ranks_filter
    )
    wishes.validate_ranks(plan.num_ranks)
    _check_port(args)
    log_directory = make_log_directory(args.log_dir)
    line = _announcement(plan, host, fewest_hosts=fewest, num_hosts=most, device=args.device)
    print(line, file=sys.stderr, flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory(prefix="evenstep-", ignore_cleanup_errors=True) as directory:  # mode 0700
        logs = RankLogs(wishes, log_directory, Path(directory))
        return _Run(args, plan, logs, Path(directory), num_hosts=most, announced=line, template=template).execute()


class _Run:
    """One run: the directory that its ranks share, and what is known of failures."""

    def __init__(
        self,
        args: Namespace,
        plan: RankPlan,
        logs: RankLogs,
        run_directory: Path,
        *,
        num_hosts: int,
        announced: str,
        template: Template | None = None,
    ) -> None:
        self._args = args
        self._budgets = Budgets.parse(args.budget)
        self._template = template
        self._run_directory = run_directory
        self._num_ranks = plan.num_ranks
        self._num_hosts = num_hosts
        self._num_attempts = args.max_restarts + 1
        self._failure: Failure | None = None
        self._was_preempted = False
        self._limit = RestartLimit()
        self._logs, self._log_directory = logs, Path(logs.root_log_dir)
        self._logs_are_temporary = args.log_dir is None
        self._variables = environment.run_variables(
            "run",
            run_directory=run_directory,
            num_nodes=num_hosts,
            device=args.device,
            announced=announced,
            faults=args.inject,
            budgets=str(self._budgets),
            stamps_lines=args.log_dir is not None,
        ) | {"OMP_NUM_THREADS": str(plan.num_threads)}

    def execute(self) -> int:
        """Start the ranks and stay until they have ended."""
        try:
            with environment.exported(self._variables), _quiet_torchelastic():
                self._launch()
        except ChildFailedError as error:
            return self._status_of(error)
        except (SignalException, KeyboardInterrupt) as error:
            if self._was_preempted:
                return EXIT_PREEMPTED
            stopped_by = error.sigval if isinstance(error, SignalException) else signal.SIGINT
            what = "interrupted" if stopped_by == signal.SIGINT else f"stopped by {stopped_by.name}"
            print(f"evenstep: {what}; all ranks were stopped", file=sys.stderr, flush=True)  # noqa: T201
            return 128 + stopped_by
        except RendezvousError as error:
            cause = error.__cause__ or error
            raise ConfigurationError(
                f"the hosts could not meet at {self._args.rdzv_endpoint or self._args.master_addr}: {cause}. Check "
                f"that every host runs the same command, and that the address and port can be reached."
            ) from None
        finally:
            if self._logs_are_temporary and (self._failure is None or not self._has_logs()):
                shutil.rmtree(self._log_directory, ignore_errors=True)
        return EXIT_PREEMPTED if self._was_preempted else 0

    def _has_logs(self) -> bool:
        return any(path.stat().st_size > 0 for path in self._log_directory.glob("rank-*.log"))

    def _launch(self) -> None:
        rendezvous.register()
        args = on_one_host(for_workers(self._args, num_ranks=self._num_ranks, parent_pid=os.getpid()))
        if args.master_port is None:
            args.master_port = 29500
        if self._num_hosts > 1:
            hosts_rendezvous.register()
            place = meeting_place(args)
            args = on_several_hosts(
                args, own_address=network.address_towards(*place), keeps_store=network.is_own_address(place[0])
            )
        try:
            config, command, command_args = config_from_args(args)
        except (ValueError, AssertionError) as error:
            raise ConfigurationError(f"evenstep run: {error}") from None
        config.logs_specs = self._logs
        config.log_line_prefix_template = PREFIX
        config.monitor_interval = 1e-4  # the interval is spent in our own look, which ends when a rank does
        if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)  # lines of other ranks appear when they are written
        timeout_s = getattr(config, "shutdown_timeout", args.shutdown_timeout)  # torch 2.11: ours alone
        agent = functools.partial(
            RankAgent,
            run_directory=self._run_directory,
            policy=StopPolicy(
                terminate_s=float(timeout_s or 0),
                stopped_grace_s=self._args.stopped_grace,
                look_every_s=self._args.monitor_interval,
            ),
            budgets=self._budgets,
            on_failure=self._on_failure,
            on_preempted=self._on_preempted,
            limit=self._limit,
        )
        # launch_agent takes no class for its agent, so the name that it looks up is ours for the while.
        with mock.patch.object(api, "LocalElasticAgent", agent), copied_from(self._template):
            api.launch_agent(config, command, list(command_args))

    def _on_failure(self, failure: Failure, restarts_left: int) -> bool:
        """Say who failed; whether to start again, if that is allowed."""
        self._failure = failure
        self._limit.note(attempt=failure.attempt, saves=failure.saves, saved_step=failure.saved_step)
        goes_on = restarts_left > 0 and not self._limit.is_reached
        destination = self._logs.destinations.get(failure.culprit.rank)
        log = "" if destination is None else destination.stderr or destination.stdout
        attempt = f"attempt {failure.attempt + 1} of {self._num_attempts}"
        text = tell(
            failure,
            run=f"run {self._log_directory.name.removeprefix('evenstep-logs-')}, {attempt}, host {platform.node()}",
            num_hosts=self._num_hosts,
            log=log,
            log_tail=tail(log) if log else "",
            other_logs=self._log_directory if not goes_on and self._has_logs() else None,
            saved_step=self._limit.saved_step,
        )
        if restarts_left > 0 and not goes_on:
            text += (
                f"\nevenstep: {self._limit.num_in_vain} restarts have come to no new checkpoint, so there is no other, "
                f"though --max-restarts {self._args.max_restarts} allows {restarts_left} more"
            )
        if goes_on:
            text += f"\nevenstep: restarting all ranks: attempt {failure.attempt + 2} of {self._num_attempts}"
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        return goes_on

    def _on_preempted(self) -> None:
        self._was_preempted = True

    def _status_of(self, error: ChildFailedError) -> int:
        if self._failure is not None:
            return status_of(self._failure)
        _, failure = error.get_first_failure()
        return exit_status(failure.exitcode) or 1


@contextlib.contextmanager
def _quiet_torchelastic() -> Iterator[None]:
    """Nothing that torchelastic logs or warns of is printed, unless torch's own variables ask for it."""
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


def _announcement(plan: RankPlan, host: Host, *, fewest_hosts: int, num_hosts: int, device: str | None) -> str:
    kind = (device or ("cuda" if host.num_gpus else "cpu")).partition(":")[0]
    world_size = plan.num_ranks * num_hosts
    shares_a_gpu = device is not None and ":" in device
    transport = "nccl" if kind == "cuda" and not shares_a_gpu else "gloo"
    if world_size == 1:
        transport = "local"
    elif transport == "gloo" and num_hosts == 1:  # a rank that finds it can't be says so itself
        transport = "shared memory" if kind == "cpu" else "host memory"
    return environment.announcement(
        world_size=world_size,
        num_nodes=num_hosts,
        device=kind,
        num_threads=plan.num_threads,
        transport=transport,
        fewest_nodes=fewest_hosts,
    )


def _check_target(args: Namespace) -> None:
    target = args.training_script
    if args.logs_specs is not None:
        raise ConfigurationError("--logs-specs: evenstep run has its own. Use --log-dir, --redirects, --tee.")
    if args.module and args.no_python:
        raise ConfigurationError("--module and --no-python exclude each other: a module is run by python.")
    if args.module:
        # Only the first part: finding a submodule would import its parent here.
        with _current_directory_first():
            if importlib.util.find_spec(target.partition(".")[0]) is None:
                raise ConfigurationError(f"no module named {target!r}. Look for a typing error, or leave out -m.")
    elif args.no_python:
        if shutil.which(target) is None:
            raise ConfigurationError(f"{target}: no such program. Give its path, or a name that is on the PATH.")
    elif Path(target).is_dir():
        raise ConfigurationError(f"{target} is a directory. Give the path of a script, or -m and a module.")
    elif not Path(target).exists():
        raise ConfigurationError(f"{target}: no such script (looked in {Path.cwd()}).")


@contextlib.contextmanager
def _current_directory_first() -> Iterator[None]:
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop(0)


def _check_port(args: Namespace) -> None:
    port = fixed_port(args)
    if port is None or args.node_rank != 0:
        return
    host = args.rdzv_endpoint.rpartition(":")[0] or args.master_addr
    if network.is_taken(host.strip("[]"), port):
        owner = network.owner_of(port)
        raise ConfigurationError(
            f"port {port} is in use" + (f" by {owner}" if owner else "") + ". Choose another with --master-port, or on "
            "one host leave it out: the system then chooses a free one."
        )
