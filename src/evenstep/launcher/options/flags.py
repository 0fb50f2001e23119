"""The command line of `evenstep run`: a parser for evenstep's flags; torchrun's other flags are passed on to torch."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import run as torch_run
from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.events.handlers import get_logging_handler

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.ground.environment import NODE_TIMEOUT_S, is_set, value
from evenstep.ground.host.network import LOOPBACK
from evenstep.launcher.options.ranks import RANKS_ALIASES

_DESCRIPTION = """\
Start a training script on several ranks: on this host, or, with --nnodes, on several.
Every flag of torchrun is understood, with dashes or underscores, and so are its PET_* variables.

Rank 0 writes to the terminal. The other ranks write to files, which are kept when something fails. When a rank
fails, the others are stopped, its traceback is the last thing on the screen, and its exit status is ours."""

_EPILOG = """\
examples:
  evenstep run train.py --epochs 10                       as many ranks as this host has GPUs, or fit its cores
  evenstep run --nproc-per-node 2 --all-ranks train.py    two ranks, both on the terminal
  evenstep run --check                                    no script: is everything in order, and how fast?
  evenstep run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 train.py    on each host its own rank

exit status: 0 if all ranks ended well, else the status of the rank that failed first; 128 + n if signal n ended it;
130 after Ctrl-C; 75 if the run was asked to stop and has saved a checkpoint; 71 if a rank didn't come in time, 72 if
ranks disagree, 73 for NaN or drift, 74 for a checkpoint, 76 if a host is lost; 78 if the command is wrong."""

# torchrun's flags that evenstep neither reads nor gives another default: flags with a value, and flags without. A flag
# that isn't in this list is passed on, too, if it is written --flag=value.
_PASSED_ON = (
    "--role",
    "--start-method",
    "--event-log-handler",
    "--logs-specs",
    "--numa-binding",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
)
_SWITCHES_PASSED_ON = ("--run-path", "--virtual-local-rank")
_OTHERS = """\
Passed on to torch: --role, --start-method, --event-log-handler, --numa-binding, --virtual-local-rank,
--duplicate-stdout-filters, --duplicate-stderr-filters; see `torchrun --help`."""

_CHECK = "evenstep.tools.preflight.rank_check"
_LONGEST_INTERVAL_S = 3600.0
_LAUNCHERS_ALONE = (
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--max-restarts",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--threads-per-rank",
    "--all-ranks",
    "--stopped-grace",
    "--node-timeout",
    "--name-after",
    "--cold-start",
)


class _Parser(ArgumentParser):
    """Reports a wrong command line as a `ConfigurationError`. argparse would print the usage and exit with 2."""

    def error(self, message: str) -> NoReturn:
        """Raise a `ConfigurationError`."""
        guess = checks.option_meant(message, self.format_help())
        raise ConfigurationError(f"{message}.{guess} See `{self.prog} --help`.")


def make_parser(*, allow_abbrev: bool = False) -> ArgumentParser:
    """The parser of evenstep's flags, and of torchrun's flags that evenstep reads or gives another default.

    Args:
        allow_abbrev: Accept abbreviated flags, if they are unambiguous.
    """
    parser = _Parser(
        prog="evenstep run",
        usage="evenstep run [options] script.py [arguments of the script]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=allow_abbrev,
        add_help=False,
    )
    parser.add_argument("training_script", metavar="script", help="What every rank runs.")
    # Before python 3.13 argparse also requires this argument, under a name that isn't in the help.
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help=SUPPRESS).required = False

    add = _adder(parser, "most used")
    add(
        "--nproc-per-node",
        action=env,
        default="auto",
        metavar="N",
        help="Ranks on this host: a number, gpu, cpu, or auto: GPUs if there are any, else physical cores divided by "
        "the threads per rank (default: auto).",
        aliases=RANKS_ALIASES,
    )
    add(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda (a GPU for each rank), or cuda:0 (that one for all) (default: GPUs if there are any).",
    )
    add("--all-ranks", action="store_true", help="Show every rank's output on the terminal; short for --tee 3.")
    add(
        "--log-dir",
        action=env,
        metavar="DIR",
        help="Where the output of ranks other than 0 goes: DIR/<time>-<host>-<pid>/rank-1.log. With a directory, every "
        "line begins with time, rank and step (default: a temporary directory, removed when all went well).",
    )
    add(
        "--max-restarts",
        action=env,
        type=int,
        default=0,
        metavar="N",
        help="Start all ranks again after a failure, at most this often (default: 0).",
    )

    add = _adder(parser, "several hosts")
    add("--nnodes", action=env, default="1:1", metavar="N", help="Hosts, or MIN:MAX of them (default: 1).")
    add(
        "--node-rank",
        action=env,
        type=int,
        default=0,
        metavar="N",
        help="Which of the hosts this is, from 0 (default: 0).",
    )
    add(
        "--master-addr",
        action=env,
        metavar="HOST",
        help="Name or address of host 0, where the hosts meet (default: 127.0.0.1).",
    )
    add(
        "--master-port",
        action=env,
        type=int,
        metavar="PORT",
        help="Port of host 0 where the hosts meet, or the ranks of a script with torch's own init_process_group "
        "(default: a free one on one host, else 29500).",
    )
    add(
        "--rdzv-backend",
        action=env,
        default="static",
        metavar="NAME",
        help="How the hosts meet: static (each host has a --node-rank) or c10d (default: static).",
    )
    add(
        "--rdzv-endpoint",
        action=env,
        default="",
        metavar="HOST:PORT",
        help="HOST:PORT where they meet; the same as --master-addr and --master-port.",
    )
    add(
        "--rdzv-id",
        action=env,
        default="none",
        metavar="NAME",
        help="Name of the run, the same on all hosts, for --rdzv-backend c10d (default: none).",
    )
    add(
        "--rdzv-conf",
        action=env,
        default="",
        metavar="KEY=VALUE,...",
        help="More settings of the rendezvous: KEY=VALUE,...",
    )
    add(
        "--local-addr",
        action=env,
        metavar="HOST",
        help="Address of this host for the others (default: the one on the way to --master-addr).",
    )
    add("--standalone", action=check_env, help="Only this host. This is the default without --nnodes.")

    add = _adder(parser, "before a long run")
    add(
        "--check",
        action="store_true",
        help="Run no script, but check that ranks add correctly and can take a step, and measure latency and bandwidth "
        "of every pair of ranks.",
    )
    add(
        "--inject",
        metavar="FAULT",
        help='Have a rank fail on purpose: "kill:rank=1,step=7"; others: stop, raise, exit, segfault, hang, nan, '
        "drift.",
    )

    add = _adder(parser, "how ranks are started")
    add(
        "--threads-per-rank",
        type=int,
        metavar="N",
        help="Threads of each rank's CPU operations (default: OMP_NUM_THREADS if it is set, else the physical cores "
        "divided by the ranks; with --nproc-per-node auto, an eighth of the cores).",
    )
    add("-m", "--module", action=check_env, help="script is the name of a module, as with python -m.")
    add("--no-python", action=check_env, help="script is a program other than python.")
    add(
        "--servers",
        type=int,
        default=0,
        metavar="N",
        help="Start N parameter servers beside the workers, for evenstep.parameter_server; on one host. The others go "
        "on without a worker that is killed (default: 0).",
    )
    add(
        "--secret-file",
        metavar="FILE",
        help="On each node, a file with the same content that only this user may read. With it processes of parameter "
        "servers prove that they belong to the run (default: EVENSTEP_SECRET_FILE; without a file, every process "
        "that can reach the rendezvous is accepted).",
    )
    add(
        "--cold-start",
        action="store_true",
        help="Start every rank as a new python, not as a fork of one that has imported torch. Slower; for libraries "
        "that can't be forked.",
    )

    add = _adder(parser, "output")
    add(
        "-t",
        "--tee",
        action=env,
        default="0",
        metavar="STREAMS",
        help="Show other ranks' streams on the terminal too, each line after [rank 1]: 1 stdout, 2 stderr, 3 both; or "
        "1:3,2:1 for some ranks (default: 0).",
    )
    add(
        "-r",
        "--redirects",
        action=env,
        default="0",
        metavar="STREAMS",
        help="Send rank 0's streams to a file too: 1 stdout, 2 stderr, 3 both; or 0:3 for one rank. Other ranks "
        "always write to files (default: 0).",
    )
    add(
        "--local-ranks-filter",
        action=env,
        default="",
        metavar="RANKS",
        help="Show only these ranks of this host on the terminal, e.g. 1,2; the others write to files.",
    )

    add = _adder(parser, "failures")
    add(
        "--name-after",
        type=float,
        default=10.0,
        metavar="S",
        help="When ranks have waited this long for another one (or for ten steps, if these take longer), print which "
        "rank it is, with its stack. The run goes on. inf: never (default: 10).",
    )
    add(
        "--phase-timeout",
        default="",
        metavar="PHASE=S,...",
        help="Seconds a rank may stay in a phase while others wait for it; then the run ends with status 71 "
        "(default: step=600, between=600, evaluating=3600, compiling=3600, saving=3600, starting=1800).",
    )
    add(
        "--stopped-grace",
        type=float,
        default=30.0,
        metavar="S",
        help="Seconds that a rank may be suspended (SIGSTOP) before the run is ended with status 71 (default: 30).",
    )
    add(
        "--node-timeout",
        type=float,
        default=NODE_TIMEOUT_S,
        metavar="S",
        help="Seconds that another node may be silent before it is lost, and the run is ended with status 76 "
        "(default: 30).",
    )
    add(
        "--shutdown-timeout",
        action=env,
        type=int,
        default=value("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 5,
        metavar="S",
        help="Seconds a rank gets to end after the first signal, before SIGKILL (default: 5).",
    )
    add(
        "--signals-to-handle",
        action=env,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
        metavar="NAMES",
        help="Signals on which the ranks are stopped (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2).",
    )
    add(
        "--monitor-interval",
        action=env,
        type=float,
        default=0.1,
        metavar="S",
        help="Seconds between two checks of the ranks (default: 0.1).",
    )

    add = _adder(parser, "others", _OTHERS)
    add("-h", "--help", action="help", help="Show this and end.")
    for flag in _PASSED_ON:
        add(flag, dest="passed_on", action="append", type=f"{flag}={{}}".format, default=[], help=SUPPRESS)
    for flag in _SWITCHES_PASSED_ON:
        add(flag, dest="passed_on", action="append_const", const=flag, default=[], help=SUPPRESS)
    return parser


def _adder(parser: ArgumentParser, title: str, description: str | None = None) -> Callable[..., None]:
    """Begin a new section of the help, and return the function that adds flags to it.

    A flag is understood with underscores too, and by its aliases: the help leaves these out.
    """
    group = parser.add_argument_group(title, description)

    def add(*names: str, action: Any = "store", aliases: Sequence[str] = (), **settings: Any) -> None:
        shown = group.add_argument(*names, action=action, **settings)
        others = {"--" + names[-1][2:].replace("-", "_"), *aliases} - {*names}
        # torch's actions `env` and `check_env` read a PET_* variable for their default. Only the flag that the help
        # shows may do so.
        plain = {env: "store", check_env: "store_true"}.get(action, action)
        hidden = {"dest": shown.dest, "action": plain, "default": SUPPRESS, "help": SUPPRESS}
        if others:
            parser.add_argument(*sorted(others), **{**settings, **hidden})

    return add


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse a command line. With `--check` before the script, or without a script, the check takes its place.

    Raises:
        ConfigurationError: The command line is invalid.
    """
    if "--check" in arguments:
        args = _parse([*arguments, _CHECK])
        if args.check and (args.training_script != _CHECK or args.training_script_args):
            raise ConfigurationError(f"--check runs no script, but {args.training_script} was given. Leave one out.")
        if args.check:
            return validated(Namespace(**{**vars(args), "module": True}))
    return validated(_parse(list(arguments)))


def _parse(arguments: list[str]) -> Namespace:
    """Parse evenstep's flags, and pass other flags before the script to torch's parser, which has their defaults.

    torchrun accepts abbreviated flags, too, but argparse also looks for them among the script's own arguments, and
    finds `--n 5` ambiguous. So abbreviations are accepted only if the command line is invalid without them.
    """
    args, unknown = make_parser().parse_known_args(arguments)
    if unknown:
        args, unknown = make_parser(allow_abbrev=True).parse_known_args(arguments)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            passed_on = [*args.passed_on, *unknown, "--", args.training_script]
            torchruns = torch_run.parse_args(passed_on)  # type: ignore[no-untyped-call]
    except SystemExit:  # torch's parser has printed its usage, and "torchrun: error: " with the reason
        make_parser().error(said.getvalue().rpartition(": error: ")[2].strip())
    return Namespace(**{**vars(torchruns), **vars(args)})


def behind_the_script(args: Namespace, arguments: Sequence[str]) -> str | None:
    """The first launcher flag that comes after the script, so that the script gets it; None if there is none. Pure.

    Only looks for flags that a script is unlikely to have.

    Args:
        args: The result of `parse`.
        arguments: The command line's arguments. If a `--` separates the launcher's from the script's, the result is
            None.
    """
    for given in () if "--" in arguments else args.training_script_args:
        if given.startswith("--") and given.partition("=")[0].replace("_", "-") in _LAUNCHERS_ALONE:
            return str(given)
    return None


def validated(args: Namespace) -> Namespace:
    """Check the numbers among the arguments, and return the arguments. Pure.

    Raises:
        ConfigurationError: A number is invalid.
    """
    checks.number("--stopped-grace", args.stopped_grace, least=0, finite=False)
    checks.number("--node-timeout", args.node_timeout, above=0, finite=False)
    checks.number("--name-after", args.name_after, above=0, finite=False)
    checks.number("--monitor-interval", args.monitor_interval, above=0, most=_LONGEST_INTERVAL_S)
    checks.whole("--max-restarts", args.max_restarts, least=0)
    checks.whole("--servers", args.servers, least=0)
    try:
        get_logging_handler(args.event_log_handler)
    except KeyError:
        raise checks.refuse("--event-log-handler", args.event_log_handler, "console or null") from None
    if args.servers and (num_nodes(args)[1] > 1 or args.check):
        raise ConfigurationError(
            "--servers is for the ranks of a script on one node. On several nodes, start all ranks in the same way and "
            "set EVENSTEP_SERVERS to the number of servers; the last ranks then are servers."
        )
    checks.whole("--shutdown-timeout", args.shutdown_timeout, least=0)
    handled_signals(args.signals_to_handle)
    if args.master_port is not None:
        checks.whole("--master-port", args.master_port, least=0, most=65535)
    return args


def handled_signals(names: str) -> list[signal.Signals]:
    """The signals on which the ranks are stopped. Pure.

    Args:
        names: Their names, separated by commas; "": none.

    Raises:
        ConfigurationError: A name is unknown, or the signal can't be handled.
    """
    chosen: list[signal.Signals] = []
    for name in filter(None, (name.strip() for name in names.split(","))):
        found = getattr(signal, name, None)
        if not isinstance(found, signal.Signals) or found in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigurationError(
                f"--signals-to-handle {name}: no signal that can be handled. Use names such as SIGTERM,SIGUSR1."
            )
        chosen.append(found)
    return chosen


def num_nodes(args: Namespace) -> tuple[int, int]:
    """The fewest and the most nodes of the run.

    Raises:
        ConfigurationError: `--nnodes` is neither a number nor MIN:MAX, or `--node-rank` is out of range.
    """
    try:
        fewest, most = torch_run.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        fewest, most = 0, 0
    if not 0 < fewest <= most:
        raise ConfigurationError(f"--nnodes {args.nnodes}: use a number of hosts, or MIN:MAX with 1 <= MIN <= MAX.")
    if not 0 <= args.node_rank < most and not args.standalone:
        # With a wrong node rank, this node and the others would wait for each other for ever.
        choice = "is 0" if most == 1 else f"lies between 0 and {most - 1}"
        hosts = str(most) if fewest == most else args.nnodes
        raise ConfigurationError(f"--node-rank {args.node_rank}: with --nnodes {hosts} it {choice}.")
    return int(fewest), int(most)


def placed_by(task: tuple[int, str, int] | None, args: Namespace, arguments: Sequence[str]) -> Namespace:
    """Add the rendezvous from another launcher's variables to the arguments, unless the user has given one.

    Pure.

    Args:
        task: Node rank, address and port; None: another launcher has set none.
        args: The parsed arguments.
        arguments: The command line, to see which flags the user has given.
    """
    own = ("--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint", "--rdzv-backend", "--standalone")
    before_script = arguments[: len(arguments) - len(args.training_script_args)]
    said = any(word.replace("_", "-").startswith(own) for word in before_script)
    if task is None or said or is_set("PET_NODE_RANK") or is_set("PET_RDZV_ENDPOINT"):
        return args
    node_rank, address, port = task
    return Namespace(**{**vars(args), "node_rank": node_rank, "master_addr": address, "master_port": port})


def for_workers(args: Namespace, *, num_ranks: int, parent_pid: int) -> Namespace:
    """Make evenstep's worker the script to run, with the user's target as its first arguments. Pure."""
    kind = "module" if args.module else "program" if args.no_python else "script"
    changed = {
        "nproc_per_node": str(num_ranks),
        "module": False,
        "no_python": False,
        "run_path": False,
        "training_script": str(Path(__file__).parents[1] / "spawn" / "start_worker.py"),
        "training_script_args": [str(parent_pid), kind, args.training_script, *args.training_script_args],
        # torchelastic's own log files aren't used, and must not be created.
        "redirects": "0",
        "tee": "0",
        "log_dir": "/dev/null",
        "local_ranks_filter": "",
        "master_port": 29500 if args.master_port is None else args.master_port,
    }
    return Namespace(**{**vars(args), **changed})


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, and their rendezvous, as configured on one of them.

    Attributes:
        fewest: The least number of nodes.
        most: The largest number of nodes.
        rank: This node's rank, if the number of nodes is fixed.
        host: Name or address of node 0.
        port: The port on which node 0 listens for the others; in a run on one node, the ranks' `MASTER_PORT`. None: not
            given.
        backend: torch's name for the rendezvous.
        may_restart: Whether ranks are started again if they fail.
    """

    fewest: int
    most: int
    rank: int
    host: str
    port: int | None
    backend: str
    may_restart: bool


def plan_nodes(args: Namespace) -> Nodes:
    """The nodes that a command line describes. Pure.

    Raises:
        ConfigurationError: The arguments are contradictory, or lack the place of the rendezvous.
    """
    fewest, most = num_nodes(args)
    is_static = args.rdzv_backend == "static" and not args.standalone
    if most > 1 and args.standalone:
        raise ConfigurationError(
            f"--standalone means one host, but --nnodes {args.nnodes} means more: leave one of them out."
        )
    if fewest < most and is_static:
        raise ConfigurationError(
            f"--nnodes {args.nnodes}: a number that changes needs --rdzv-backend c10d and --rdzv-endpoint HOST:PORT."
        )
    host, _, port = args.rdzv_endpoint.rpartition(":")
    if not args.rdzv_endpoint:
        host, port = args.master_addr, args.master_port
        if most > 1 and is_static and args.node_rank and not host:
            raise ConfigurationError(
                f"--node-rank {args.node_rank} of {most}: where is node 0? Give all nodes its address, with "
                f"--master-addr."
            )
    elif not host or not (port.isdecimal() and int(port) < 1 << 16):
        if is_static:
            raise ConfigurationError(f"--rdzv-endpoint {args.rdzv_endpoint}: use HOST:PORT.")
        host = args.rdzv_endpoint
    return Nodes(
        fewest,
        most,
        rank=args.node_rank if most > 1 else 0,
        host=(host or LOOPBACK).strip("[]"),
        port=int(port or 0) or None if is_static else None,
        backend=args.rdzv_backend,
        may_restart=args.max_restarts > 0,
    )
