"""`evenstep bench predict FILE`: a measured step, simulated on ranks that one doesn't have."""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace

from evenstep.bench.predict.arguments import add_json_argument, parse_counts, read_json, write_json
from evenstep.bench.predict.cost import ALGORITHMS, Link, Network
from evenstep.bench.predict.network import join_levels, levels_from_json
from evenstep.bench.predict.profile import profile_of_report
from evenstep.bench.predict.simulate import VARIANTS, Profile, predict, prediction_table
from evenstep.errors import ConfigurationError

CHECKED = (
    "Predicted, not measured. Predictions have been compared with measurements on 4 ranks of one machine alone; a "
    "cluster has stragglers, shared wires and loaders that are not simulated. Measure where you can."
)
_DEFAULT_RANKS = "8,16,32,64,128,256,512,1024"


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `evenstep bench predict`."""
    parser.add_argument("--links", metavar="FILE", help="the network, measured by `evenstep bench network --json FILE`")
    parser.add_argument("--ranks", default=_DEFAULT_RANKS, metavar="N,N", help="of all hosts (default: %(default)s)")
    parser.add_argument("--nproc-per-node", type=int, default=8, metavar="N", help="ranks of a host (default: 8)")
    parser.add_argument(
        "--nproc_per_node", "--ranks-per-node", type=int, dest="nproc_per_node", default=SUPPRESS, help=SUPPRESS
    )
    parser.add_argument("--batch", type=float, metavar="N", help="samples of each rank (default: as in the profile)")
    parser.add_argument(
        "--global-batch", type=float, metavar="N", help="samples of all ranks (strong scaling); instead of --batch"
    )
    parser.add_argument(
        "--intra-node",
        metavar="US,GBIT",
        help="between ranks of a host: microseconds of a message, Gbit/s (default: as in --links)",
    )
    parser.add_argument(
        "--inter-node", metavar="US,GBIT", help="between hosts, whose ranks share it (default: as in --links)"
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, help="how collectives are done (default: as in --links, else nccl)"
    )
    parser.add_argument(
        "--spread", type=float, metavar="MS", help="deviation of a rank's passes (default: as in the profile)"
    )
    add_json_argument(parser)
    parser.add_argument("file", help="report.json of `evenstep bench run script.py`, or a profile of a step")


def main(args: Namespace) -> int:
    """Read, simulate, print a table.

    Raises:
        ConfigurationError: A file or a flag makes no sense.
    """
    profile = read_profile(args.file)
    if args.batch is not None and args.global_batch is not None:
        raise ConfigurationError("--batch and --global-batch exclude each other.")
    if args.batch is not None:
        if not args.batch > 0:
            raise ConfigurationError(f"--batch {args.batch}: more than 0.")
        profile = profile.at(args.batch)
    if args.spread is not None:
        profile = Profile(**{**vars(profile), "spread_s": args.spread / 1e3})
    predictions = predict(
        profile,
        read_network(args),
        parse_counts(args.ranks),
        ranks_per_node=args.nproc_per_node,
        variants=VARIANTS,
        global_batch=args.global_batch,
    )
    sys.stdout.write(describe(profile) + "\n\n" + prediction_table(predictions) + f"\n\n{CHECKED}\n")
    if args.json is not None:
        write_json(args.json, [each.to_json() for each in predictions])
    return 0


def describe(profile: Profile) -> str:
    """One line on what is simulated. Pure."""
    return (
        f"{profile.num_samples:g} samples a rank: forward {profile.forward_s * 1e3:,.1f} ms, backward "
        f"{profile.backward_s * 1e3:,.1f} ms, optimizer {profile.optimizer_s * 1e3:,.1f} ms, "
        f"{len(profile.buckets)} buckets of {profile.bucket_bytes / 2**20:,.1f} MiB in all"
    )


def read_profile(file: str) -> Profile:
    """Read a profile, or derive one from a report.

    Raises:
        ConfigurationError: The file can't be read, or holds none.
    """
    read = read_json(file)
    if isinstance(read, dict) and "curves" in read:
        try:
            return profile_of_report(read)
        except ConfigurationError as error:
            raise ConfigurationError(f"{file}: {error}") from error
    if isinstance(read, dict) and "profile" in read:
        read = read["profile"]
    if not isinstance(read, dict):
        raise ConfigurationError(f"{file} holds no profile of a step.")
    try:
        return Profile.from_json(read)
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}") from error


def read_network(args: Namespace) -> Network:
    """Read the network from the flags.

    Raises:
        ConfigurationError: Too little, or something that isn't a link.
    """
    levels = {} if args.links is None else levels_from_json(read_json(args.links), where=args.links)
    intra_node = None if args.intra_node is None else parse_link("--intra-node", args.intra_node)
    inter_node = None if args.inter_node is None else parse_link("--inter-node", args.inter_node)
    if levels:
        measured = join_levels(levels, prefers=args.algorithm)
        return Network(intra_node or measured.intra_node, inter_node or measured.inter_node, measured.algorithm)
    known = intra_node or inter_node
    if known is None:
        raise ConfigurationError("bench predict needs a network: --links FILE, or --intra-node and --inter-node.")
    return Network(intra_node or known, inter_node or known, args.algorithm or "nccl")


def parse_link(flag: str, text: str) -> Link:
    """ "5,200" is 5 microseconds and 200 Gbit/s."""
    latency, comma, rate = text.partition(",")
    try:
        if not comma:
            raise ValueError
        return Link.from_gbit(float(latency), float(rate))
    except ConfigurationError as error:
        raise ConfigurationError(f"{flag} {text}: {error}") from error
    except ValueError:
        raise ConfigurationError(f"{flag} {text}: write microseconds and Gbit/s, such as 5,200.") from None
