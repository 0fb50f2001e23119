"""Cases that others have measured and published, simulated from data sheets.

    python benchmarks/published.py

[Note: fixed beforehand]

Nothing here was chosen so that a result comes out. The parameters are those of data sheets, of the papers' own
descriptions, and of one table of speeds of a single GPU; `docs/contributing/predictions-measured.md` says where each
comes from, and shows by how much the simulation misses. What no data sheet has is left out: the share of a wire's rate
that programs reach, ranks that are late, loaders, the networks of shared clusters. So efficiencies come out too high,
and by how much is a measure of what was left out.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from evenstep.bench.predict.cost import Algorithm, Link, Network, Topology
from evenstep.bench.predict.simulate import Bucket, Profile, simulate_step

# Latencies of messages of NCCL's rings and trees ("Simple" protocol), microseconds, by which it chooses between them:
# NCCL 2.9, src/graph/tuning.cc, `hwLat`.
_RING_US = {"NVLink": 3.4, "PCIe": 5.7, "network": 9.6}
_TREE_US = {"inside": 28.0, "network": 50.0}

# Gbit/s in one direction. NVLink 1: 4 links of 20 GB/s (P100); NVLink 2: 6 of 25 GB/s (V100); PCIe 3.0 x16: 15.75 GB/s.
_INSIDE_GBIT = {"4 x NVLink 1": 640.0, "6 x NVLink 2": 1200.0, "PCIe 3.0 x16": 126.0}

# Images a second of one P100 (TensorFlow 1.x, "Performance benchmarks", DGX-1, synthetic data, May 2017), by batch.
P100_IMAGES_PER_S = {
    ("ResNet-50", 32): 195.0,
    ("ResNet-50", 64): 219.0,
    ("ResNet-152", 64): 91.8,
    ("Inception V3", 64): 142.0,
    ("VGG-16", 64): 154.0,
}
_V100_OVER_P100 = 15.7 / 10.6  # peak TFLOP/s in float32 of their SXM2 data sheets
_BACKWARD_OVER_FORWARD = 2.0  # two products of matrices where the forward pass has one


@dataclass(frozen=True)
class Layer:
    """A layer of a network.

    Attributes:
        numel: Its parameters.
        operations: Multiplications of a forward pass over one image.
    """

    numel: int
    operations: float


def _conv(channels_in: int, channels_out: int, kernel: int, side: int, *, has_norm: bool = True) -> Layer:
    numel = channels_in * channels_out * kernel * kernel
    return Layer(numel + 2 * channels_out if has_norm else numel + channels_out, numel * side * side)


def _dense(features_in: int, features_out: int) -> Layer:
    return Layer((features_in + 1) * features_out, features_in * features_out)


def resnet(depths: Sequence[int]) -> list[Layer]:
    """A ResNet of bottlenecks (He et al., 2015); (3, 4, 6, 3) has 50 layers."""
    layers = [_conv(3, 64, 7, 112)]
    channels, side = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            stride = 2 if block == 0 and stage > 0 else 1
            layers.append(_conv(channels, width, 1, side))
            side //= stride
            layers += [_conv(width, width, 3, side), _conv(width, 4 * width, 1, side)]
            if block == 0:
                layers.append(_conv(channels, 4 * width, 1, side))
            channels = 4 * width
    return [*layers, _dense(channels, 1000)]


def vgg16() -> list[Layer]:
    """VGG-16 (Simonyan and Zisserman, 2014)."""
    layers, channels, side = [], 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(_conv(channels, width, 3, side, has_norm=False))
            channels = width
        side //= 2
    return [*layers, _dense(512 * 7 * 7, 4096), _dense(4096, 4096), _dense(4096, 1000)]


def inception_v3() -> list[Layer]:
    """Inception V3 (Szegedy et al., 2015) as 94 equal layers, with the totals of the paper: 23.8 million parameters."""
    return [Layer(23_800_000 // 94, 5.7e9 / 94)] * 94


def ready_times(layers: Sequence[Layer], backward_s: float) -> Iterator[tuple[int, float]]:
    """(bytes of float32, when the gradient is there), from the last layer to the first."""
    total, done = sum(layer.operations for layer in layers), 0.0
    for layer in reversed(layers):
        done += layer.operations
        yield 4 * layer.numel, backward_s * done / total


Fusion = Callable[[Sequence[tuple[int, float]]], tuple[Bucket, ...]]


def by_layer(ready: Sequence[tuple[int, float]]) -> tuple[Bucket, ...]:
    """Every layer travels by itself."""
    return tuple(Bucket(size, when) for size, when in ready)


def by_size(ready: Sequence[tuple[int, float]]) -> tuple[Bucket, ...]:
    """torch's DDP: a first bucket of 1 MiB, then of 25 MiB."""
    buckets: list[Bucket] = []
    gathered, last, cap = 0, 0.0, 1 << 20
    for size, when in ready:
        if gathered and gathered + size > cap:
            buckets.append(Bucket(gathered, last))
            gathered, cap = 0, 25 << 20
        gathered, last = gathered + size, when
    return (*buckets, Bucket(gathered, last))


def by_cycle(ready: Sequence[tuple[int, float]]) -> tuple[Bucket, ...]:
    """Horovod: every 5 ms what has become ready travels, in vectors of at most 64 MiB."""
    cycle_s, cap = 5e-3, 64 << 20
    buckets: list[Bucket] = []
    for size, when in ready:
        leaves = (when // cycle_s + 1) * cycle_s
        if buckets and buckets[-1].ready_s == leaves and buckets[-1].num_bytes + size <= cap:
            buckets[-1] = Bucket(buckets[-1].num_bytes + size, leaves)
        else:
            buckets.append(Bucket(size, leaves))
    return tuple(buckets)


@dataclass(frozen=True)
class Case:
    """Something published.

    Attributes:
        source: Who.
        model: What was trained.
        layers: Of the model.
        batch: Images of a GPU.
        images_per_s: Of one GPU.
        topology: The ranks.
        baseline: The ranks that it is compared with.
        network: What they talk through.
        fusion: What travels together.
        published: The efficiency that they have measured.
    """

    source: str
    model: str
    layers: tuple[Layer, ...]
    batch: int
    images_per_s: float
    topology: Topology
    baseline: Topology
    network: Network
    fusion: Fusion
    published: float

    def profile(self) -> Profile:
        """One GPU's step."""
        passes = self.batch / self.images_per_s
        backward_s = passes * _BACKWARD_OVER_FORWARD / (1 + _BACKWARD_OVER_FORWARD)
        return Profile(
            num_samples=self.batch,
            forward_s=passes - backward_s,
            backward_s=backward_s,
            optimizer_s=0.0,  # part of the speed of one GPU
            buckets=self.fusion(list(ready_times(self.layers, backward_s))),
        )

    def efficiency(self, *, has_latency: bool = True) -> float:
        """Throughput of a GPU over that of a GPU of the baseline, simulated.

        Args:
            has_latency: Messages take time, however short they are.
        """
        profile, network = self.profile(), self.network if has_latency else _without_latency(self.network)
        many = simulate_step(profile, self.topology, network).step_s
        return simulate_step(profile, self.baseline, network).step_s / many


def _network(intra_node: str, gbit: float, algorithm: Algorithm) -> Network:
    kind = "PCIe" if intra_node.startswith("PCIe") else "NVLink"
    return Network(
        Link.from_gbit(_RING_US[kind], _INSIDE_GBIT[intra_node]),
        Link.from_gbit(_RING_US["network"], gbit),
        algorithm,
        tree=(_TREE_US["inside"] * 1e-6, _TREE_US["network"] * 1e-6),
    )


def _without_latency(network: Network) -> Network:
    intra_node, inter_node = (replace(link, latency_s=0.0) for link in (network.intra_node, network.inter_node))
    return replace(network, intra_node=intra_node, inter_node=inter_node, tree=(0.0, 0.0))


def _resnet101_images_per_s() -> float:
    """Between ResNet-50 and ResNet-152, by multiplications: neither paper nor table has it."""
    short, middle, long = (sum(layer.operations for layer in resnet(d)) for d in (_50, _101, _152))
    at_short = 1 / P100_IMAGES_PER_S["ResNet-50", 64]
    at_long = 1 / P100_IMAGES_PER_S["ResNet-152", 64]
    return 1 / (at_short + (at_long - at_short) * (middle - short) / (long - short))


_50, _101, _152 = (3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)


def cases() -> list[Case]:
    """All of them."""
    one = Topology(1, 1)
    horovod = _network("PCIe 3.0 x16", 25.0, "ring")
    of_horovod = [
        ("Inception V3", inception_v3(), P100_IMAGES_PER_S["Inception V3", 64], 0.90),
        ("ResNet-101", resnet(_101), _resnet101_images_per_s(), 0.90),
        ("VGG-16", vgg16(), P100_IMAGES_PER_S["VGG-16", 64], 0.68),
    ]
    return [
        Case(
            "Goyal et al. 2017, 256 P100 against 8",
            "ResNet-50",
            tuple(resnet(_50)),
            32,
            P100_IMAGES_PER_S["ResNet-50", 32],
            Topology(32, 8),
            Topology(1, 8),
            _network("4 x NVLink 1", 50.0, "halving"),
            by_layer,
            0.90,
        ),
        *(
            Case(
                "Horovod 2018, 512 Pascal GPUs",
                model,
                tuple(layers),
                64,
                speed,
                Topology(128, 4),
                one,
                horovod,
                by_cycle,
                efficiency,
            )
            for model, layers, speed, efficiency in of_horovod
        ),
        Case(
            "PyTorch DDP 2020, 256 V100",
            "ResNet-50",
            tuple(resnet(_50)),
            32,
            P100_IMAGES_PER_S["ResNet-50", 32] * _V100_OVER_P100,
            Topology(32, 8),
            one,
            _network("6 x NVLink 2", 100.0, "nccl"),
            by_size,
            0.50,
        ),
    ]


def published_table() -> str:
    """For people, and for the documentation."""
    lines = [
        "| case | model | published | simulated | residual | simulated, messages without latency |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for case in cases():
        simulated = case.efficiency()
        lines.append(
            f"| {case.source} | {case.model} | {case.published:.0%} | {simulated:.1%} "
            f"| {100 * (simulated - case.published):+.1f} points | {case.efficiency(has_latency=False):.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print(published_table())
