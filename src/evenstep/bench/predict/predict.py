"""`evenstep bench --predict FILE`: a measured step, simulated on ranks that one doesn't have."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from evenstep.bench.cost import ALGORITHMS, Link, Network
from evenstep.bench.network import join_levels, levels_from_json
from evenstep.bench.profile import profile_of_report
from evenstep.bench.simulate import VARIANTS, Prediction, Profile, predict, prediction_table
from evenstep.errors import ConfigurationError

_DEFAULT_RANKS = "8,16,32,64,128,256,512,1024"


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `evenstep bench --predict`."""
    parser.add_argument("file", help="report.json of `evenstep bench script.py`, or a profile of a step")
    parser.add_argument("--links", metavar="FILE", help="what `evenstep bench --network --json FILE` has measured")
    parser.add_argument(
        "--inside", metavar="US,GBIT", help="between ranks of a host: microseconds of a message, Gbit/s; beats --links"
    )
    parser.add_argument("--between", metavar="US,GBIT", help="between hosts, whose ranks share it; beats --links")
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, help="how collectives are done; as measured with --links, else nccl"
    )
    parser.add_argument("--ranks", default=_DEFAULT_RANKS, metavar="N,N", help=f"how many; {_DEFAULT_RANKS}")
    parser.add_argument("--ranks-per-host", type=int, default=8, metavar="K", help="8")
    parser.add_argument("--batch", type=float, metavar="N", help="samples of each rank; as in the profile")
    parser.add_argument("--global-batch", type=float, metavar="N", help="samples of all ranks (strong scaling)")
    parser.add_argument("--spread", type=float, metavar="MS", help="deviation of a rank's passes; as in the profile")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")


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
        ranks_per_host=args.ranks_per_host,
        variants=VARIANTS,
        global_batch=args.global_batch,
    )
    sys.stdout.write(describe(profile) + "\n\n" + prediction_table(predictions) + "\n")
    if args.json is not None:
        _write(args.json, predictions)
    return 0


def describe(profile: Profile) -> str:
    """One line on what is simulated. Pure."""
    return (
        f"{profile.num_samples:g} samples a rank: forward {profile.forward_s * 1e3:,.1f} ms, backward "
        f"{profile.backward_s * 1e3:,.1f} ms, optimizer {profile.optimizer_s * 1e3:,.1f} ms, "
        f"{len(profile.buckets)} buckets of {profile.bucket_bytes / 2**20:,.1f} MiB in all"
    )


def read_profile(file: str) -> Profile:
    """A profile, or what a report tells of one.

    Raises:
        ConfigurationError: The file can't be read, or holds none.
    """
    read = _read(file)
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
    """What the flags say of the network.

    Raises:
        ConfigurationError: Too little, or something that isn't a link.
    """
    levels = {} if args.links is None else levels_from_json(_read(args.links), where=args.links)
    inside = None if args.inside is None else parse_link("--inside", args.inside)
    between = None if args.between is None else parse_link("--between", args.between)
    if levels:
        measured = join_levels(levels, prefers=args.algorithm)
        return Network(inside or measured.inside, between or measured.between, measured.algorithm)
    known = inside or between
    if known is None:
        raise ConfigurationError("--predict needs a network: --links FILE, or --inside and --between.")
    return Network(inside or known, between or known, args.algorithm or "nccl")


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


def parse_counts(text: str) -> list[int]:
    """ "8,16" is [8, 16]."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigurationError(f"--ranks {text}: write numbers from 1 on, such as 8,16,64.")
    return [int(part) for part in parts]


def _read(file: str) -> Any:
    try:
        return json.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is no JSON: {error}.") from error


def _write(file: str, predictions: list[Prediction]) -> None:
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps([each.to_json() for each in predictions], indent=1))
    except OSError as error:
        raise ConfigurationError(f"--json {file}: {error.strerror or error}.") from error
