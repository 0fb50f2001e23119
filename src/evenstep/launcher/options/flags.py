"""The command line of `evenstep run`: torchrun's own parser, with our defaults and our words."""

from __future__ import annotations

import argparse
import functools
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.argparse_util import env
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from evenstep import checks
from evenstep.environment import elastic_shutdown_timeout, is_set
from evenstep.errors import ConfigurationError

REPLACE, SHRINK = "replace", "shrink"  # of --recover

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

# torchrun's words where ours differ, or are shorter. SUPPRESS: understood, but of no use here.
_HELP = {
    "nproc_per_node": "Ranks on this host: a number, gpu, cpu, or auto: GPUs if there are any, else physical cores "
    "divided by the threads per rank (default: auto).",
    "nnodes": "Hosts, or MIN:MAX of them (default: 1).",
    "node_rank": "Which of the hosts this is, from 0 (default: 0).",
    "master_addr": "Name or address of host 0, where the hosts meet (default: 127.0.0.1).",
    "master_port": "Port of host 0 where the hosts meet, or the ranks of a script with torch's own "
    "init_process_group (default: a free one on one host, else 29500).",
    "rdzv_backend": "How the hosts meet: static (each host says its --node-rank) or c10d (default: static).",
    "rdzv_endpoint": "HOST:PORT where they meet; the same as --master-addr and --master-port.",
    "rdzv_id": "Name of the run, the same on all hosts, for --rdzv-backend c10d (default: none).",
    "rdzv_conf": "More settings of the rendezvous: KEY=VALUE,...",
    "local_addr": "Address of this host for the others (default: the one on the way to --master-addr).",
    "numa_binding": "Bind ranks to the CPUs near their GPUs (default: not bound).",
    "log_dir": "Where the output of ranks other than 0 goes: DIR/<time>-<pid>/rank-1.log. With a directory, every line "
    "begins with time, rank and step (default: a temporary directory, removed when all went well).",
    "redirects": "Send rank 0's streams to a file too: 1 stdout, 2 stderr, 3 both; or 0:3 for one rank. Other ranks "
    "always write to files (default: 0).",
    "tee": "Show other ranks' streams on the terminal too, each line after [rank 1]: 1 stdout, 2 stderr, 3 both; or "
    "1:3,2:1 for some ranks (default: 0).",
    "local_ranks_filter": "Show only these ranks of this host on the terminal, e.g. 1,2; the others write to files.",
    "max_restarts": "Start all ranks again after a failure, at most this often; with --servers, single ranks that were "
    "killed (default: 0).",
    "monitor_interval": "Seconds between two looks at the ranks (default: 0.1).",
    "standalone": "This host alone. Without --nnodes that is so anyway.",
    "shutdown_timeout": "Seconds a rank gets to end after the first signal, before SIGKILL (default: 5).",
    "signals_to_handle": "Signals on which the ranks are stopped (default: SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1).",
    "module": "script is the name of a module, as with python -m.",
    "no_python": "script is a program other than python.",
    "training_script": "What every rank runs.",
    "training_script_args": SUPPRESS,
    "run_path": SUPPRESS,
    "logs_specs": SUPPRESS,
    "start_method": SUPPRESS,
    "event_log_handler": SUPPRESS,
    "role": SUPPRESS,
    "duplicate_stdout_filters": SUPPRESS,
    "duplicate_stderr_filters": SUPPRESS,
    "virtual_local_rank": SUPPRESS,
}

# Groups of the help, by `dest`. What stands in none of them comes last.
_GROUPS = {
    "most used": ("nproc_per_node", "device", "all_ranks", "log_dir", "max_restarts"),
    "several hosts": (
        "nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf",
        "local_addr", "standalone",
    ),
    "before a long run": ("check", "inject"),
    "how ranks are started": ("threads_per_rank", "module", "no_python", "servers", "numa_binding", "cold_start"),
    "output": ("tee", "redirects", "local_ranks_filter"),
    "failures": (
        "recover", "min_ranks", "name_after", "phase_timeout", "stopped_grace", "shutdown_timeout",
        "signals_to_handle", "monitor_interval",
    ),
}  # fmt: skip
_METAVARS = {
    "nproc_per_node": "N",
    "nnodes": "N",
    "node_rank": "N",
    "max_restarts": "N",
    "master_addr": "HOST",
    "master_port": "PORT",
    "local_addr": "HOST",
    "rdzv_backend": "NAME",
    "rdzv_endpoint": "HOST:PORT",
    "rdzv_id": "NAME",
    "rdzv_conf": "KEY=VALUE,...",
    "log_dir": "DIR",
    "redirects": "STREAMS",
    "tee": "STREAMS",
    "local_ranks_filter": "RANKS",
    "monitor_interval": "S",
    "shutdown_timeout": "S",
    "signals_to_handle": "NAMES",
    "training_script": "script",
}
# Other names for --nproc-per-node, which all commands take.
RANKS_ALIASES = ("--nproc_per_node", "--ranks", "--replicas", "--ranks-per-node")

_DEFAULT_SHUTDOWN_TIMEOUT_S = 5
# Names of the rendezvous in `launcher.elastic.rendezvous`.
ONE_NODE, FIXED_NODES = "evenstep", "evenstep-nodes"
_CHECK = "evenstep.preflight.rank_check"
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
    "--recover",
    "--min-ranks",
    "--stopped-grace",
    "--name-after",
    "--cold-start",
)


def add_nproc_per_node(
    parser: ArgumentParser,
    *,
    help: str,
    type: Callable[[str], Any] = int,
    default: Any = None,
    metavar: str = "N",
    dest: str = "nproc_per_node",
) -> None:
    """Add `--nproc-per-node` and its other names, which the help leaves out.

    Args:
        parser: Of a command that starts ranks on this host.
        help: What it says.
        type: Of the value: some commands take several numbers.
        default: If it isn't given.
        metavar: How the help shows the value.
        dest: Attribute of the parsed arguments.
    """
    parser.add_argument("--nproc-per-node", dest=dest, type=type, default=default, metavar=metavar, help=help)
    parser.add_argument(*RANKS_ALIASES, dest=dest, type=type, default=SUPPRESS, help=SUPPRESS)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows --nproc-per-node, and not --nproc_per_node, which is understood, too."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [each for each in action.option_strings if "_" not in each]
        if not shown:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        return ", ".join(shown) + value


def make_parser() -> ArgumentParser:
    """torchrun's parser, extended."""
    parser = _torchruns_parser()
    parser.prog = "evenstep run"
    parser.usage = "evenstep run [options] script.py [arguments of the script]"
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.formatter_class = _HelpFormatter
    # argparse would print the usage and exit with 2: what is wrong in a command is said in one way, whoever finds it.
    parser.error = functools.partial(_refuse, parser)  # type: ignore[method-assign]
    ours = parser.add_argument_group("evenstep")
    aliases = [each for each in RANKS_ALIASES if each not in parser._option_string_actions]
    ours.add_argument(*aliases, dest="nproc_per_node", default=SUPPRESS, help=SUPPRESS)
    ours.add_argument(
        "--threads-per-rank",
        "--threads_per_rank",
        type=int,
        metavar="N",
        help="Threads of each rank's CPU operations (default: OMP_NUM_THREADS if it is set, else the physical cores "
        "divided by the ranks; with --nproc-per-node auto, an eighth of the cores).",
    )
    ours.add_argument(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda (a GPU for each rank), or cuda:0 (that one for all) (default: GPUs if there are any).",
    )
    ours.add_argument(
        "--servers",
        type=int,
        default=0,
        metavar="N",
        help="Start N parameter servers beside the workers, for evenstep.parameter_server; on one host. A worker that "
        "is killed then doesn't end the run (default: 0).",
    )
    ours.add_argument(
        "--all-ranks",
        "--all_ranks",
        action="store_true",
        help="Show every rank's output on the terminal; short for --tee 3.",
    )
    ours.add_argument(
        "--inject",
        metavar="FAULT",
        help='Have a rank fail on purpose: "kill:rank=1,step=7"; others: stop, raise, exit, segfault, hang, nan, '
        "drift.",
    )
    ours.add_argument(
        "--recover",
        choices=[REPLACE, SHRINK],
        help="When a rank is lost, go on from the step that all had finished, out of a survivor's memory: with as many "
        "ranks as before (replace), or on one node with those that are left (shrink). Needs a Checkpointer. CPU ranks.",
    )
    ours.add_argument(
        "--min-ranks",
        "--min_ranks",
        type=int,
        default=1,
        metavar="N",
        help="With --recover shrink: don't go on with fewer ranks (default: %(default)s).",
    )
    ours.add_argument(
        "--stopped-grace",
        "--stopped_grace",
        type=float,
        default=30.0,
        metavar="S",
        help="Seconds that a rank may be suspended (SIGSTOP) before the run is ended with status 71 (default: 30).",
    )
    ours.add_argument(
        "--name-after",
        "--name_after",
        type=float,
        default=10.0,
        metavar="S",
        help="When ranks have waited this long for another one (or for ten steps, if these take longer), print which "
        "rank it is, with its stack. The run goes on. inf: never (default: 10).",
    )
    ours.add_argument(
        "--phase-timeout",
        "--phase_timeout",
        default="",
        metavar="PHASE=S,...",
        help="Seconds a rank may stay in a phase while others wait for it; then the run ends with status 71 "
        "(default: step=600, between=600, evaluating=3600, compiling=3600, saving=3600, starting=1800).",
    )
    ours.add_argument(
        "--cold-start",
        "--cold_start",
        action="store_true",
        help="Start every rank as a new python, and not as a copy of one that has imported torch. Slower; for "
        "libraries that can't be forked.",
    )
    ours.add_argument(
        "--check",
        action="store_true",
        help="Run no script: do the ranks add up correctly and take a step? Measures latency and bandwidth of every "
        "pair of ranks.",
    )
    for action in parser._actions:
        if action.help != SUPPRESS:
            action.help = _HELP.get(action.dest, action.help)
        action.metavar = _METAVARS.get(action.dest, action.metavar)
        if action.dest == "training_script_args":
            # Before python 3.13 argparse asks for it too, by a name that the help doesn't know.
            action.required = False
    if not is_set("PET_NPROC_PER_NODE"):
        parser.set_defaults(nproc_per_node="auto")
    if not is_set("PET_SIGNALS_TO_HANDLE"):
        parser.set_defaults(signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    if not (is_set("PET_SHUTDOWN_TIMEOUT") or is_set("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")):
        parser.set_defaults(shutdown_timeout=_DEFAULT_SHUTDOWN_TIMEOUT_S)
    _arrange(parser)
    return parser


def _arrange(parser: ArgumentParser) -> None:
    """Put the flags into the groups of `_GROUPS`, in the order given there; the help shows them so."""
    _, options, ours = parser._action_groups
    rest = [*options._group_actions, *ours._group_actions]
    parser._action_groups[1:] = []
    for title, dests in _GROUPS.items():
        chosen = [action for dest in dests for action in rest if action.dest == dest]
        parser.add_argument_group(title)._group_actions.extend(chosen)
        rest = [action for action in rest if action not in chosen]
    parser.add_argument_group("others")._group_actions.extend(rest)


def _torchruns_parser() -> ArgumentParser:
    """torchrun's parser as torch 2.13 makes it, whatever torch this is.

    torch 2.11's takes port 29500 where none is given, which a second run on the host would find taken, and has no
    shutdown timeout.
    """
    parser: ArgumentParser = get_args_parser()
    if not is_set("PET_MASTER_PORT"):
        parser.set_defaults(master_port=None)
    if not any(action.dest == "shutdown_timeout" for action in parser._actions):
        parser.add_argument(
            "--shutdown-timeout", "--shutdown_timeout", action=env, type=int, default=elastic_shutdown_timeout()
        )
    return parser


def parse(arguments: Sequence[str]) -> Namespace:
    """A command line; with `--check` before the script, or without one, the check stands for the script.

    Raises:
        ConfigurationError: It can't be understood.
    """
    if "--check" in arguments:
        args = _parse([*arguments, _CHECK])
        if args.check and (args.training_script != _CHECK or args.training_script_args):
            raise ConfigurationError(f"--check runs no script, but {args.training_script} was given. Leave one out.")
        if args.check:
            return validated(Namespace(**{**vars(args), "module": True}))
    return validated(_parse(list(arguments)))


def _parse(arguments: list[str]) -> Namespace:
    """Abbreviated flags are torchrun's, too, but argparse looks for them among the script's own arguments as well, and
    finds `--n 5` ambiguous: they are taken only where there is something that can't be understood without."""
    parser = make_parser()
    parser.allow_abbrev = False
    try:
        return parser.parse_args(arguments)
    except ConfigurationError:
        parser.allow_abbrev = True
        return parser.parse_args(arguments)


def behind_the_script(args: Namespace, arguments: Sequence[str]) -> str | None:
    """The first flag of the launcher's that stands behind the script, which gets it instead; None if there is none.

    Of those that a script is unlikely to have. Pure.

    Args:
        args: What `parse` made.
        arguments: Of the command line. A `--` separates the launcher's from the script's: nothing is looked for then.
    """
    for given in () if "--" in arguments else args.training_script_args:
        if given.startswith("--") and given.partition("=")[0].replace("_", "-") in _LAUNCHERS_ALONE:
            return str(given)
    return None


def validated(args: Namespace) -> Namespace:
    """The same arguments, if their numbers make sense. Pure.

    Raises:
        ConfigurationError: One doesn't.
    """
    checks.number("--stopped-grace", args.stopped_grace, least=0, finite=False)
    checks.number("--name-after", args.name_after, above=0, finite=False)
    checks.number("--monitor-interval", args.monitor_interval, above=0)
    checks.whole("--max-restarts", args.max_restarts, least=0)
    checks.whole("--servers", args.servers, least=0)
    if args.servers and (num_nodes(args)[1] > 1 or args.check):
        raise ConfigurationError(
            "--servers is for the ranks of a script on one node. On several, start all ranks alike and set "
            "EVENSTEP_SERVERS: so many of them, the last ones, are servers."
        )
    checks.whole("--min-ranks", args.min_ranks, least=1)
    if args.min_ranks > 1 and args.recover != SHRINK:
        raise ConfigurationError(f"--min-ranks {args.min_ranks} says how far --recover {SHRINK} may go. Pass both.")
    if args.recover is not None and args.servers:
        raise ConfigurationError(
            f"--recover {args.recover} is for replicas, and a server holds what nobody else has. Leave it out: with "
            f"--max-restarts and a Checkpointer, all ranks go on from the newest checkpoint."
        )
    if args.recover == SHRINK and num_nodes(args)[1] > 1:
        raise ConfigurationError(
            f"--recover {SHRINK} is for one node. On several, --recover {REPLACE} starts lost ranks again, and "
            f"--nnodes MIN:MAX says with how few nodes the run goes on."
        )
    if args.shutdown_timeout is not None:
        checks.whole("--shutdown-timeout", args.shutdown_timeout, least=0)
    if args.master_port is not None:
        checks.whole("--master-port", args.master_port, least=0, most=65535)
    return args


def _refuse(parser: ArgumentParser, message: str) -> NoReturn:
    guess = checks.option_meant(message, parser._option_string_actions)
    raise ConfigurationError(f"{message}.{guess} See `evenstep run --help`.")


def num_nodes(args: Namespace) -> tuple[int, int]:
    """The fewest and the most hosts.

    Raises:
        ConfigurationError: `--nnodes` is neither a number nor MIN:MAX, or `--node-rank` is none of theirs.
    """
    try:
        fewest, most = parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        fewest, most = 0, 0
    if not 0 < fewest <= most:
        raise ConfigurationError(f"--nnodes {args.nnodes}: use a number of hosts, or MIN:MAX with 1 <= MIN <= MAX.")
    if not 0 <= args.node_rank < most and not args.standalone:
        # It would wait for the others for ever, and they for it.
        choice = "is 0" if most == 1 else f"lies between 0 and {most - 1}"
        hosts = str(most) if fewest == most else args.nnodes
        raise ConfigurationError(f"--node-rank {args.node_rank}: with --nnodes {hosts} it {choice}.")
    return int(fewest), int(most)


def placed_by(task: tuple[int, str, int] | None, args: Namespace, arguments: Sequence[str]) -> Namespace:
    """The same arguments, with the rendezvous that another launcher's variables give, unless the user named one.

    Pure.

    Args:
        task: Node rank, address and port; None: nothing is known.
        args: The parsed arguments.
        arguments: The command line, to see what the user has said.
    """
    own = ("--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint", "--rdzv-backend", "--standalone")
    before_script = arguments[: len(arguments) - len(args.training_script_args)]
    said = any(word.replace("_", "-").startswith(own) for word in before_script)
    if task is None or said or is_set("PET_NODE_RANK") or is_set("PET_RDZV_ENDPOINT"):
        return args
    node_rank, address, port = task
    return Namespace(**{**vars(args), "node_rank": node_rank, "master_addr": address, "master_port": port})


def for_workers(args: Namespace, *, num_ranks: int, parent_pid: int) -> Namespace:
    """The same arguments, with our worker as the script to run and the user's target as its first arguments. Pure."""
    kind = "module" if args.module else "program" if args.no_python else "script"
    changed = {
        "nproc_per_node": str(num_ranks),
        "module": False,
        "no_python": False,
        "run_path": False,
        "training_script": str(Path(__file__).parents[1] / "spawn" / "start_worker.py"),
        "training_script_args": [str(parent_pid), kind, args.training_script, *args.training_script_args],
        # torchelastic's own log files are not used, and must not be made.
        "redirects": "0",
        "tee": "0",
        "log_dir": "/dev/null",
        "local_ranks_filter": "",
    }
    return Namespace(**{**vars(args), **changed})


def on_one_host(args: Namespace) -> Namespace:
    """The same arguments, with our one-node rendezvous unless a flag names another. Pure."""
    _, most = num_nodes(args)
    if most > 1 or args.rdzv_backend not in ("static", "c10d"):
        return args
    port = fixed_port(args)
    changed = {
        "rdzv_backend": ONE_NODE,
        "rdzv_conf": "",
        "rdzv_endpoint": "" if port is None else f"localhost:{port}",
    }
    return Namespace(**{**vars(args), **changed, "node_rank": 0})


def on_several_hosts(args: Namespace, *, own_address: str | None, keeps_store: bool = False) -> Namespace:
    """The same arguments for several nodes, with our rendezvous where each node has a `--node-rank`. Pure.

    Args:
        args: The arguments.
        own_address: This node's address on the way to the rendezvous; None: torch resolves this host's name.
        keeps_store: The rendezvous is at an address of this node (and not loopback, which every node has).
    """
    fewest, most = num_nodes(args)
    changed: dict[str, object] = {} if args.local_addr else {"local_addr": own_address}
    if fewest == most and args.rdzv_backend == "static":
        conf = ",".join(filter(None, [args.rdzv_conf, f"rank={args.node_rank}"]))
        endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        changed |= {"rdzv_backend": FIXED_NODES, "rdzv_conf": conf, "rdzv_endpoint": endpoint}
    elif args.rdzv_backend == "c10d" and keeps_store and "is_host" not in args.rdzv_conf:
        # torch compares the endpoint with what this host's name means, which is another address where it has several.
        changed["rdzv_conf"] = ",".join(filter(None, [args.rdzv_conf, "is_host=1"]))
    return Namespace(**{**vars(args), **changed})


def rendezvous_endpoint(args: Namespace) -> tuple[str, int]:
    """Address and port of the rendezvous of several nodes. Pure."""
    host, _, port = args.rdzv_endpoint.rpartition(":")
    if host and port.isdigit():
        return host.strip("[]"), int(port)
    return (args.rdzv_endpoint or args.master_addr), int(args.master_port or 29500)


def fixed_port(args: Namespace) -> int | None:
    """The user's port for the rendezvous of the ranks; None if the system may choose. Pure."""
    if args.standalone or args.rdzv_backend != "static":
        return None
    host, _, port = args.rdzv_endpoint.rpartition(":")
    if args.rdzv_endpoint:
        if not host or not port.isdigit():
            raise ConfigurationError(f"--rdzv-endpoint {args.rdzv_endpoint}: use HOST:PORT.")
        return int(port) or None
    return args.master_port or None
