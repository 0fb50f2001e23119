"""Virtual ranks: the fixed number of parts in which reproducible mode computes every global batch.

[Note: virtual ranks]

    global batch      |   0   |   1   |   2   |   3   |   4   |   5   |   6   |   7   |     virtual ranks = 8
    1 rank            |--------------------------- rank 0 ----------------------------|
    2 ranks           |----------- rank 0 ------------|----------- rank 1 ------------|
    4 ranks           |--- rank 0 ----|--- rank 1 ----|--- rank 2 ----|--- rank 3 ----|

A rank computes its virtual ranks one after the other. A virtual rank computes the same on any number of ranks: with the
same samples in tensors of the same shape, the same random numbers, module buffers and number of threads. The results of
virtual ranks are added in one binary tree over virtual ranks; each rank has a subtree of it:

    virtual rank   0   1   2   3   4   5   6   7
            \\ /     \\ /     \\ /     \\ /
             +       +       +       +            inside the rank, if it has both
              \\_____/         \\_____/
                 +               +
                  \\_____________/
                         +                        the rest by the transport, whose order is a tree over ranks

*One rule of division* for loaders (into ranks) and for `microbatches` (into virtual ranks): parts are contiguous,
differ by at most one, and the longer ones come first. The parts inside one rank's share are again such a division of
that share. So a rank can cut its share without knowing the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.ground.computing.randomness import mix
from evenstep.ground.health.users_code import warn

DEFAULT_VIRTUAL_RANKS = 8
_TAG = 0x6C616E65  # keeps these random streams unrelated to others from the same seed
_VERSION = 1
_MOST_THREADS = 256
# Facts that bits depend on, in words, if the fact's key isn't clear to people.
_WORDS = {
    "cpu": "the CPU",
    "vector_instructions": "the CPU's vector instructions",
    "num_threads": "the number of CPU threads",
    "onednn": "oneDNN",
    "blas": "the BLAS library",
    "gpu": "the GPU",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
}


def begin_of(length: int, index: int, num_parts: int) -> int:
    """First index of part `index`, if `length` things are divided into `num_parts`; for `num_parts` the end. Pure."""
    each, rest = divmod(length, num_parts)
    return index * each + min(index, rest)


@dataclass
class VirtualRanks:
    """The virtual ranks of a run, on one rank.

    Attributes:
        num_virtual_ranks: The number of virtual ranks, a power of two.
        rank: This rank.
        world_size: Number of ranks; divides `num_virtual_ranks`.
        seed: The seed of all random streams.
        facts: Everything that bits depend on, besides virtual ranks and seed (`determinism.facts`).
        num_loops: Loops over micro-batches so far, of all models; a part of the random streams' key.
        current: The virtual rank that is being computed; None between loops.
    """

    num_virtual_ranks: int
    rank: int
    world_size: int
    seed: int
    facts: dict[str, str] = field(default_factory=dict)
    num_loops: int = 0
    current: int | None = None

    @property
    def per_rank(self) -> int:
        """The number of virtual ranks on each rank."""
        return self.num_virtual_ranks // self.world_size

    @property
    def first(self) -> int:
        """The number of this rank's first virtual rank."""
        return self.rank * self.per_rank

    def key(self, virtual_rank: int) -> int:
        """The key of one virtual rank's random streams in the present loop; 64 bits."""
        return mix(_TAG, self.seed, self.num_loops, virtual_rank)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint saves, in JSON types."""
        return {
            "version": _VERSION,
            "virtual_ranks": self.num_virtual_ranks,
            "seed": self.seed,
            "num_loops": self.num_loops,
            "facts": dict(self.facts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state that `state_dict` returned, on any number of ranks.

        Rank 0 warns of every fact that has changed and may change the bits.

        Raises:
            ConfigurationError: The state has another number of virtual ranks or another seed.
        """
        if state.get("version") != _VERSION:
            raise ConfigurationError(
                f"version {_VERSION} of virtual ranks is supported, this is {state.get('version')!r}."
            )
        for name, value, argument in (
            ("virtual_ranks", self.num_virtual_ranks, "virtual_ranks"),
            ("seed", self.seed, "seed"),
        ):
            if state[name] != value:
                raise ConfigurationError(
                    f"the run was made with {argument}={state[name]} and continues with {argument}={value}: the bits "
                    f"would differ. Pass evenstep.init(reproducible=True, {argument}={state[name]}), or start afresh."
                )
        self.num_loops = int(state["num_loops"])
        found = changes(state["facts"], self.facts)
        if found and self.rank == 0:
            warn(
                f"reproducible mode: the bits may differ from those of an undisturbed run, because {'; '.join(found)}.",
            )


def per_rank(virtual_ranks: VirtualRanks | None) -> int:
    """The number of parts of a global batch on each rank: its virtual ranks, or one. Pure."""
    return 1 if virtual_ranks is None else virtual_ranks.per_rank


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The facts that have changed, in words. Pure."""
    return [
        f"{_WORDS.get(name, name)} was {before.get(name, 'unknown')} and is {now.get(name, 'unknown')}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]


def disagreements(facts: Sequence[dict[str, str]]) -> list[str]:
    """Differences between the ranks of a run, in words. Pure.

    For each fact, the first rank whose value differs from rank 0's is named.
    """
    first = facts[0]
    found = []
    for name, value in first.items():
        rank = next((rank for rank, each in enumerate(facts) if each.get(name) != value), None)
        if rank is not None:
            found.append(
                f"{_WORDS.get(name, name)} is {value} on rank 0 and {facts[rank].get(name, 'unknown')} on rank {rank}"
            )
    return found


def validate_mode(*, reproducible: Any, virtual_ranks: Any, threads: Any, seed: int | None, num_cores: int) -> None:
    """Check the arguments of `init`, as far as one rank can. Pure.

    Args:
        reproducible: See `init`.
        virtual_ranks: See `init`.
        threads: See `init`; may exceed the number of cores up to a limit, to get the bits of a larger node here.
        seed: See `init`.
        num_cores: The cores of this node.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    checks.switch("evenstep.init: reproducible", reproducible)
    for name, value in (("virtual_ranks", virtual_ranks), ("threads", threads)):
        if value is not None and not reproducible:
            raise checks.refuse(f"evenstep.init: {name}", value, "it needs reproducible=True, which is missing")
        if value is not None:
            checks.whole(f"evenstep.init: {name}", value, least=1)
    most = max(_MOST_THREADS, 4 * num_cores)
    if threads is not None and threads > most:
        raise ConfigurationError(
            f"evenstep.init: threads={threads}; at most {most} on this node, which has {num_cores} cores. Bits depend "
            f"on the number: pass the number of the runs that you compare with, or leave it out, for 1."
        )
    if not reproducible:
        return
    if seed is None:
        raise ConfigurationError(
            "evenstep.init: reproducible=True without a seed; every random number comes from it. Pass seed=0."
        )
    if virtual_ranks is not None and virtual_ranks & (virtual_ranks - 1):
        below = 1 << (virtual_ranks.bit_length() - 1)
        raise ConfigurationError(
            f"evenstep.init: virtual_ranks={virtual_ranks}; a power of two, such as {below} or {2 * below}, because "
            f"virtual ranks are added in a binary tree."
        )


def validate_division(num_virtual_ranks: int, world_size: int) -> None:
    """Check that virtual ranks can be divided over ranks. Pure; the same on all ranks.

    Raises:
        ConfigurationError: They can't be divided.
    """
    if num_virtual_ranks % world_size:
        sizes = [str(1 << power) for power in range(num_virtual_ranks.bit_length())]
        fits = " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
        raise ConfigurationError(
            f"evenstep.init: virtual_ranks={num_virtual_ranks} can't be divided over {world_size} ranks. Start {fits} "
            f"ranks, or pass another number of virtual ranks (which gives other bits)."
        )
