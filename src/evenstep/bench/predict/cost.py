"""What a collective costs: a link's latency and bandwidth, the nodes, the algorithm. Pure.

[Note: the cost of a message]

A message of n bytes over a link takes `latency_s + n / bytes_per_s` (Hockney, "The communication challenge for MPP",
1994). A collective is messages one after the other, its *stages*, and bytes through the narrowest link, its *traffic*:

    algorithm      used by              stages of an all-reduce over h nodes of k        traffic of a vector of S
    ring           Gloo, NCCL           2 (n - 1), of them 2 (h - 1) inter-node          2 (n - 1) / n  S
    tree           NCCL                 2 (k - 1) intra-node, 2 log2 h inter-node        2 S
    halving        Goyal et al.         2 (k - 1) intra-node, 2 log2 h inter-node        intra-node 2 (k - 1) / k  S,
                                                                                         inter-node 2 (h - 1) / h  S
    hierarchical   evenstep over Gloo   1 intra-node; inter-node 2 for two nodes, else   intra-node k / 2 S,
                                        2 h - 1; h - 1 if eager or predicted             inter-node `group_trips`
    nccl           NCCL                 ring or tree, whichever is faster

with n = h k ranks. Stages and traffic of the ring and of the halving are those of Thakur, Rabenseifner and Gropp
("Optimization of Collective Communication Operations in MPICH", 2005). Those of the tree, and which stages of a ring
are inter-node, are those by which NCCL itself chooses (`tuning.cc`). The hierarchical algorithm is drawn in
`transport/internode/transport.py`: nodes compare their calls, and a vector goes in chunks, one of which is added inside
the node while another is on the wire. The k ranks of a node all read and write their shared memory; `memory_factor` is
that traffic over the traffic of two ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from evenstep.errors import ConfigurationError
from evenstep.transport.internode.negotiation import EAGER_BYTES, MESSAGE_BYTES, PAYLOAD_AT
from evenstep.transport.internode.plan import is_predictable, plan_chunk_bytes

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
Algorithm = Literal["ring", "tree", "nccl", "halving", "hierarchical"]

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

# What a transport does, by the name that it has on the line printed at start.
ALGORITHM_OF: dict[str, Algorithm] = {
    "local": "hierarchical",
    "shared memory": "hierarchical",
    "shared memory + gloo": "hierarchical",
    "gloo": "ring",
    "nccl": "nccl",
}
_ALIKE = 2.0  # times that differ by less tell the same


@dataclass(frozen=True)
class Link:
    """The connection of two ranks of a node, or of two nodes.

    Attributes:
        latency_s: Of one message.
        bytes_per_s: In one direction. Inter-node, that of the node, which its ranks share; of shared memory, how fast
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
class Topology:
    """The number of nodes, and of ranks on each: equally many.

    Attributes:
        num_nodes: Nodes.
        ranks_per_node: Ranks of each.
    """

    num_nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigurationError(f"{self.num_nodes} nodes of {self.ranks_per_node} ranks: at least 1 of each.")

    @classmethod
    def of(cls, num_ranks: int, ranks_per_node: int) -> Topology:
        """The topology of so many ranks; fewer than a node has are on one node.

        Raises:
            ConfigurationError: The nodes would not have equally many ranks.
        """
        if num_ranks <= ranks_per_node:
            return cls(1, num_ranks)
        if num_ranks % ranks_per_node:
            raise ConfigurationError(f"{num_ranks} ranks don't fill nodes of {ranks_per_node}; use a multiple of it.")
        return cls(num_ranks // ranks_per_node, ranks_per_node)

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.num_ranks:,} ranks on {self.num_nodes:,} node" + ("s" if self.num_nodes > 1 else "")


@dataclass(frozen=True)
class Network:
    """What ranks talk through.

    Attributes:
        intra_node: The link between the ranks of a node.
        inter_node: The link between nodes.
        algorithm: How collectives are done.
        tree: For NCCL's trees, whose messages take longer, (intra-node latency, inter-node latency) in seconds; None:
            as in `intra_node` and `inter_node`.
    """

    intra_node: Link
    inter_node: Link
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


def collective_s(collective: Collective, num_bytes: float, topology: Topology, network: Network) -> float:
    """Seconds that a collective takes when nothing else goes on.

    Args:
        collective: Which.
        num_bytes: Of the whole vector.
        topology: The ranks.
        network: What they talk through.
    """
    if topology.num_ranks == 1:
        return 0.0
    if network.algorithm == "nccl":
        ways: tuple[Algorithm, ...] = ("ring", "tree") if collective == "all_reduce" else ("ring",)
        return min(_cost(collective, num_bytes, topology, network, way) for way in ways)
    return _cost(collective, num_bytes, topology, network, network.algorithm)


def _cost(collective: Collective, num_bytes: float, topology: Topology, network: Network, way: Algorithm) -> float:
    if way == "tree" and collective == "all_reduce":
        return _tree_s(num_bytes, topology, network)
    if way in ("ring", "tree"):
        intra_node, inter_node = ring_stages(collective, topology)
        links = [network.intra_node] * (topology.ranks_per_node > 1) + [network.inter_node] * (topology.num_nodes > 1)
        narrowest = min(link.bytes_per_s for link in links)
        traffic = bus_factor(collective, topology.num_ranks) * num_bytes
        return (
            intra_node * network.intra_node.latency_s + inter_node * network.inter_node.latency_s + traffic / narrowest
        )
    if way == "halving":
        return _halving_s(collective, num_bytes, topology, network)
    return _hierarchical_s(collective, num_bytes, topology, network)


def ring_stages(collective: Collective, topology: Topology) -> tuple[int, int]:
    """(intra-node, inter-node): the stages of a ring that passes through one node after the other."""
    turns = 2 if collective == "all_reduce" else 1
    inter_node = turns * (topology.num_nodes - 1)
    return turns * (topology.num_ranks - 1) - inter_node, inter_node


def _tree_s(num_bytes: float, topology: Topology, network: Network) -> float:
    intra_node_latency_s, inter_node_latency_s = network.tree or (
        network.intra_node.latency_s,
        network.inter_node.latency_s,
    )
    links = [network.intra_node] * (topology.ranks_per_node > 1) + [network.inter_node] * (topology.num_nodes > 1)
    stages = (topology.ranks_per_node - 1) * intra_node_latency_s + math.log2(topology.num_nodes) * inter_node_latency_s
    return 2 * stages + 2 * num_bytes / min(link.bytes_per_s for link in links)


def _halving_s(collective: Collective, num_bytes: float, topology: Topology, network: Network) -> float:
    turns = 2 if collective == "all_reduce" else 1
    h, k = topology.num_nodes, topology.ranks_per_node
    intra_node = (k - 1) * network.intra_node.latency_s + (k - 1) / k * num_bytes / network.intra_node.bytes_per_s
    inter_node = (
        math.ceil(math.log2(h)) * network.inter_node.latency_s
        + (h - 1) / h * num_bytes / network.inter_node.bytes_per_s
    )
    return turns * (intra_node + inter_node)


@dataclass(frozen=True)
class Trip:
    """Inter-node messages that must arrive before anything else can happen.

    Attributes:
        num_messages: One after the other.
        num_bytes: That leave each node, all its ranks together.
    """

    num_messages: int
    num_bytes: float

    def seconds(self, link: Link) -> float:
        """How long it takes when nothing else is on the wire."""
        return self.num_messages * link.latency_s + self.num_bytes / link.bytes_per_s


def group_trips(collective: Collective, num_bytes: float, topology: Topology) -> tuple[Trip, Trip]:
    """The messages of nodes of several ranks, over Gloo: (to compare calls, the rest). See `transport/internode`.

    A short vector travels with the first messages, and so does a predicted all-reduce: those of a training step are,
    as each step repeats them. Every rank of a node sends to the ranks of its inter-node group. Gloo's all-gather is a
    ring, its all-to-all sends everything at once, its broadcast doubles the ranks that have the vector.

    Args:
        collective: Which.
        num_bytes: Of the whole vector.
        topology: More than one node, of more than one rank each.
    """
    h, k = topology.num_nodes, topology.ranks_per_node
    ring = h - 1
    of_a_rank = num_bytes if collective == "all_reduce" else num_bytes / topology.num_ranks
    if collective in ("all_reduce", "all_gather") and of_a_rank <= EAGER_BYTES:
        return Trip(ring, ring * k * MESSAGE_BYTES), Trip(0, 0.0)
    if collective == "all_reduce" and is_predictable(num_bytes, num_bytes / k, h):
        message_bytes = max(MESSAGE_BYTES, PAYLOAD_AT + num_bytes / k)
        return Trip(ring, ring * k * message_bytes), Trip(0, 0.0)
    compared = Trip(ring, ring * k * MESSAGE_BYTES)
    traffic = bus_factor(collective, h) * num_bytes
    if collective == "all_reduce":  # two nodes swap their sums; more scatter and gather them
        return compared, Trip(1 if h == 2 else 1 + ring, traffic)
    if collective == "broadcast":
        doublings = math.ceil(math.log2(h))
        return compared, Trip(doublings, doublings * num_bytes)
    return compared, Trip(1 if collective == "reduce_scatter" else ring, traffic)


def memory_factor(collective: Collective, num_ranks: int) -> float:
    """Bytes of memory that a node's ranks read and write for each byte of a vector, over those of two ranks' all-reduce
    per byte; halves of it scatter and gather."""
    return num_ranks / 2 * (1.0 if collective == "all_reduce" else 0.5)


def _hierarchical_s(collective: Collective, num_bytes: float, topology: Topology, network: Network) -> float:
    h, k = topology.num_nodes, topology.ranks_per_node
    if k == 1:  # nobody to share memory with: Gloo alone
        if collective == "reduce_scatter":
            return Trip(1, bus_factor(collective, h) * num_bytes).seconds(network.inter_node)  # an all-to-all
        return _cost(collective, num_bytes, topology, network, "ring")
    intra_node = (
        network.intra_node.latency_s + memory_factor(collective, k) * num_bytes / network.intra_node.bytes_per_s
    )
    if h == 1:
        return intra_node
    comparing, rest = (trip.seconds(network.inter_node) for trip in group_trips(collective, num_bytes, topology))
    if collective == "reduce_scatter":  # nodes compare their calls while their ranks add
        return max(intra_node, comparing) + rest
    if collective != "all_reduce":
        return intra_node + comparing + rest
    if num_bytes <= EAGER_BYTES:  # every rank carries all of it
        return intra_node + comparing
    if rest == 0.0:
        return intra_node * 1.5 + comparing  # what has been added is spread
    # Chunk by chunk; nodes compare their calls while the first chunk is added.
    num_pieces = math.ceil(num_bytes / plan_chunk_bytes(math.ceil(num_bytes)))
    intra_node += (num_pieces - 1) * network.intra_node.latency_s
    first, intra_node = intra_node / num_pieces, intra_node * 1.5
    return max(first, comparing) - first + max(intra_node, rest) + min(intra_node, rest) / num_pieces


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
