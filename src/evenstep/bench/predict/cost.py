"""What a collective costs: a link's latency and bandwidth, the hosts, the algorithm. Pure.

[Note: the cost of a message]

A message of n bytes over a link takes `latency_s + n / bytes_per_s` (Hockney, "The communication challenge for MPP",
1994). A collective is messages one after the other, its *stages*, and bytes through the narrowest link, its *traffic*:

    algorithm      who                    stages of an all-reduce over h hosts of k        traffic of a vector of S
    ring           Gloo, NCCL             2 (n - 1), of them 2 (h - 1) between hosts       2 (n - 1) / n  S
    tree           NCCL                   2 (k - 1) inside, 2 log2 h between               2 S
    halving        Goyal et al.           2 (k - 1) inside, 2 log2 h between               inside 2 (k - 1) / k  S,
                                                                                           between 2 (h - 1) / h  S
    lanes          evenstep over Gloo     1 inside; between two hosts 2, between more      inside k / 2 S,
                                          2 h - 1; h - 1 where it is short, or expected    between `lanes_trips`
    nccl           NCCL                   ring or tree, whichever is faster

with n = h k ranks. Stages and traffic of the ring and of the halving are those of Thakur, Rabenseifner and Gropp
("Optimization of Collective Communication Operations in MPICH", 2005); of the tree and of which stages of a ring cross
hosts, those by which NCCL itself chooses (`tuning.cc`). Lanes are drawn in `transport/several_hosts.py`: hosts compare
what they call, and a vector goes in pieces, of which one is added inside the host while another is on the wire. Memory
that k ranks share is read and written by all of them: that traffic is counted in what two ranks take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from evenstep.errors import ConfigurationError
from evenstep.transport.host_meetings import MESSAGE_BYTES, PAYLOAD_AT, SMALL_BYTES
from evenstep.transport.host_plan import may_be_foreseen, plan_piece_bytes

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
Algorithm = Literal["ring", "tree", "nccl", "halving", "lanes"]

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

# What a transport does, by the name that it has on the line printed at start.
ALGORITHM_OF: dict[str, Algorithm] = {
    "local": "lanes",
    "shared memory": "lanes",
    "host memory": "lanes",
    "shared memory + gloo": "lanes",
    "gloo": "ring",
    "nccl": "nccl",
}
_ALIKE = 2.0  # times that differ by less tell the same


@dataclass(frozen=True)
class Link:
    """What connects two ranks of a host, or two hosts.

    Attributes:
        latency_s: Of one message.
        bytes_per_s: In one direction. Between hosts that of the host, which its ranks share; of shared memory how fast
            it is read and written.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ConfigurationError(f"a link's latency of {self.latency_s} s: at least 0.")
        if not self.bytes_per_s > 0:
            raise ConfigurationError(f"a link's bandwidth of {self.bytes_per_s} bytes a second: more than 0.")

    @classmethod
    def from_gbit(cls, latency_us: float, gbit_per_s: float) -> Link:
        """In the units of data sheets."""
        return cls(latency_us * 1e-6, gbit_per_s * 1e9 / 8)

    def __str__(self) -> str:
        return f"{self.latency_s * 1e6:,.1f} us, {self.bytes_per_s / 1e9:,.3f} GB/s"


@dataclass(frozen=True)
class Hosts:
    """How ranks lie on hosts: equally many on each.

    Attributes:
        num_hosts: Hosts.
        ranks_per_host: Ranks of each.
    """

    num_hosts: int
    ranks_per_host: int

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.ranks_per_host < 1:
            raise ConfigurationError(f"{self.num_hosts} hosts of {self.ranks_per_host} ranks: at least 1 of each.")

    @classmethod
    def of(cls, num_ranks: int, ranks_per_host: int) -> Hosts:
        """So many ranks; fewer than a host has are on one.

        Raises:
            ConfigurationError: The hosts would not have equally many.
        """
        if num_ranks <= ranks_per_host:
            return cls(1, num_ranks)
        if num_ranks % ranks_per_host:
            raise ConfigurationError(f"{num_ranks} ranks don't fill hosts of {ranks_per_host}; use a multiple of it.")
        return cls(num_ranks // ranks_per_host, ranks_per_host)

    @property
    def num_ranks(self) -> int:
        """Of all hosts."""
        return self.num_hosts * self.ranks_per_host

    def __str__(self) -> str:
        return f"{self.num_ranks:,} ranks on {self.num_hosts:,} host" + ("s" if self.num_hosts > 1 else "")


@dataclass(frozen=True)
class Network:
    """What ranks talk through.

    Attributes:
        inside: Between the ranks of a host.
        between: Between hosts.
        algorithm: How collectives are done.
        tree: For NCCL's trees, whose messages take longer, (latency inside, latency between) in seconds; None: as in
            `inside` and `between`.
    """

    inside: Link
    between: Link
    algorithm: Algorithm
    tree: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigurationError(f"algorithm {self.algorithm!r}: use one of {', '.join(ALGORITHMS)}.")


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """What the bus bandwidth is of the algorithm bandwidth (size over time), as nccl-tests define it.

    For an all-gather and a reduce-scatter the size is that of the whole vector, over all ranks.
    """
    n = num_ranks
    return {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(collective, (n - 1) / n)


def collective_s(collective: Collective, num_bytes: float, hosts: Hosts, network: Network) -> float:
    """Seconds that a collective takes when nothing else goes on.

    Args:
        collective: Which.
        num_bytes: Of the whole vector.
        hosts: The ranks.
        network: What they talk through.
    """
    if hosts.num_ranks == 1:
        return 0.0
    if network.algorithm == "nccl":
        ways: tuple[Algorithm, ...] = ("ring", "tree") if collective == "all_reduce" else ("ring",)
        return min(_cost(collective, num_bytes, hosts, network, way) for way in ways)
    return _cost(collective, num_bytes, hosts, network, network.algorithm)


def _cost(collective: Collective, num_bytes: float, hosts: Hosts, network: Network, way: Algorithm) -> float:
    if way == "tree" and collective == "all_reduce":
        return _tree_s(num_bytes, hosts, network)
    if way in ("ring", "tree"):
        inside, between = ring_stages(collective, hosts)
        links = [network.inside] * (hosts.ranks_per_host > 1) + [network.between] * (hosts.num_hosts > 1)
        narrowest = min(link.bytes_per_s for link in links)
        traffic = bus_factor(collective, hosts.num_ranks) * num_bytes
        return inside * network.inside.latency_s + between * network.between.latency_s + traffic / narrowest
    if way == "halving":
        return _halving_s(collective, num_bytes, hosts, network)
    return _lanes_s(collective, num_bytes, hosts, network)


def ring_stages(collective: Collective, hosts: Hosts) -> tuple[int, int]:
    """(inside hosts, between hosts): the stages of a ring that passes through one host after the other."""
    turns = 2 if collective == "all_reduce" else 1
    between = turns * (hosts.num_hosts - 1)
    return turns * (hosts.num_ranks - 1) - between, between


def _tree_s(num_bytes: float, hosts: Hosts, network: Network) -> float:
    latency_inside, latency_between = network.tree or (network.inside.latency_s, network.between.latency_s)
    links = [network.inside] * (hosts.ranks_per_host > 1) + [network.between] * (hosts.num_hosts > 1)
    stages = (hosts.ranks_per_host - 1) * latency_inside + math.log2(hosts.num_hosts) * latency_between
    return 2 * stages + 2 * num_bytes / min(link.bytes_per_s for link in links)


def _halving_s(collective: Collective, num_bytes: float, hosts: Hosts, network: Network) -> float:
    turns = 2 if collective == "all_reduce" else 1
    h, k = hosts.num_hosts, hosts.ranks_per_host
    inside = (k - 1) * network.inside.latency_s + (k - 1) / k * num_bytes / network.inside.bytes_per_s
    between = (
        math.ceil(math.log2(h)) * network.between.latency_s + (h - 1) / h * num_bytes / network.between.bytes_per_s
    )
    return turns * (inside + between)


@dataclass(frozen=True)
class Trip:
    """What has to be sent between hosts before anything else can happen.

    Attributes:
        num_messages: One after the other.
        num_bytes: That leave each host, all its ranks together.
    """

    num_messages: int
    num_bytes: float

    def seconds(self, link: Link) -> float:
        """How long it takes when nothing else is on the wire."""
        return self.num_messages * link.latency_s + self.num_bytes / link.bytes_per_s


def lanes_trips(collective: Collective, num_bytes: float, hosts: Hosts) -> tuple[Trip, Trip]:
    """What hosts of several ranks send, as `transport/several_hosts.py` does over Gloo: (to compare calls, the rest).

    A short vector travels with the first, and so does an all-reduce that is expected: calls of a training step are, as
    they come again and again. Every rank of a host talks to those that have its place on the other hosts. Gloo's
    all-gather is a ring, its all-to-all sends everything at once, its broadcast doubles those who know.

    Args:
        collective: Which.
        num_bytes: Of the whole vector.
        hosts: More than one, of more than one rank.
    """
    h, k = hosts.num_hosts, hosts.ranks_per_host
    ring = h - 1
    of_a_rank = num_bytes if collective == "all_reduce" else num_bytes / hosts.num_ranks
    if collective in ("all_reduce", "all_gather") and of_a_rank <= SMALL_BYTES:
        return Trip(ring, ring * k * MESSAGE_BYTES), Trip(0, 0.0)
    if collective == "all_reduce" and may_be_foreseen(num_bytes, num_bytes / k, h):
        message_bytes = max(MESSAGE_BYTES, PAYLOAD_AT + num_bytes / k)
        return Trip(ring, ring * k * message_bytes), Trip(0, 0.0)
    compared = Trip(ring, ring * k * MESSAGE_BYTES)
    traffic = bus_factor(collective, h) * num_bytes
    if collective == "all_reduce":  # two hosts swap their sums; more share them out and gather them
        return compared, Trip(1 if h == 2 else 1 + ring, traffic)
    if collective == "broadcast":
        doublings = math.ceil(math.log2(h))
        return compared, Trip(doublings, doublings * num_bytes)
    return compared, Trip(1 if collective == "reduce_scatter" else ring, traffic)


def memory_factor(collective: Collective, num_ranks: int) -> float:
    """Bytes of memory that a host's ranks read and write for each byte of a vector, over those of two ranks' all-reduce
    per byte; halves of it scatter and gather."""
    return num_ranks / 2 * (1.0 if collective == "all_reduce" else 0.5)


def _lanes_s(collective: Collective, num_bytes: float, hosts: Hosts, network: Network) -> float:
    h, k = hosts.num_hosts, hosts.ranks_per_host
    if k == 1:  # nobody to share memory with: Gloo alone
        if collective == "reduce_scatter":
            return Trip(1, bus_factor(collective, h) * num_bytes).seconds(network.between)  # an all-to-all
        return _cost(collective, num_bytes, hosts, network, "ring")
    inside = network.inside.latency_s + memory_factor(collective, k) * num_bytes / network.inside.bytes_per_s
    if h == 1:
        return inside
    comparing, rest = (trip.seconds(network.between) for trip in lanes_trips(collective, num_bytes, hosts))
    if collective == "reduce_scatter":  # hosts compare while their ranks add
        return max(inside, comparing) + rest
    if collective != "all_reduce":
        return inside + comparing + rest
    if num_bytes <= SMALL_BYTES:  # every rank carries all of it
        return inside + comparing
    if rest == 0.0:
        return inside * 1.5 + comparing  # what has been added is spread
    # Piece by piece, and hosts compare while the first one is added.
    num_pieces = math.ceil(num_bytes / plan_piece_bytes(math.ceil(num_bytes)))
    inside += (num_pieces - 1) * network.inside.latency_s
    first, inside = inside / num_pieces, inside * 1.5
    return max(first, comparing) - first + max(inside, rest) + min(inside, rest) / num_pieces


def fit_link(points: Sequence[tuple[float, float]], *, stages: float = 1.0, traffic: float = 1.0) -> tuple[Link, float]:
    """The link that explains measured times: what the shortest vectors take, and what the longest do.

    Between them a call takes less than the sum of both: what a short one waits for, ranks that have to wake up, goes on
    while a longer one is on the wire. A line through all sizes would make up for that with a wire that is too fast.

    Args:
        points: (bytes of the vector, seconds), of at least two sizes.
        stages: Messages one after the other in what was measured.
        traffic: Bytes through the link per byte of the vector.

    Returns:
        The link, and the median of the relative errors that it leaves.

    Raises:
        ConfigurationError: Fewer than two sizes.
    """
    if len({num_bytes for num_bytes, _ in points}) < 2:
        raise ConfigurationError(f"a latency and a bandwidth can't be told from {len(points)} size; measure two.")
    shortest_s, longest_s = (way(max(seconds, 1e-12) for _, seconds in points) for way in (min, max))
    short = [point for point in points if point[1] <= _ALIKE * shortest_s]
    long = [point for point in points if point[1] >= longest_s / (2 * _ALIKE)]
    if max(short)[0] >= min(long)[0]:  # all take about as long, or are in disorder
        short, long = [min(points)], [max(points)]
    (short_bytes, short_s), (long_bytes, long_s) = _middle(short), _middle(long)
    slope = max((long_s - short_s) / (long_bytes - short_bytes), 1e-15)
    constant = short_s - slope * short_bytes
    if constant < 0:  # a line through the origin then
        constant, slope = 0.0, long_s / long_bytes
    errors = sorted(abs(constant + slope * x - y) / max(y, 1e-12) for x, y in points)
    return Link(constant / stages, traffic / slope), errors[len(errors) // 2]


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean of sizes and of times, in which each time counts as much as any other."""
    weights = [1 / max(seconds, 1e-12) ** 2 for _, seconds in points]
    total = sum(weights)
    return (
        sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total,
        sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total,
    )
