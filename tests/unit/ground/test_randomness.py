"""Streams are seeded, kept apart and put back."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from evenstep.ground.computing import randomness


def draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_what_is_drawn_inside_preserved_leaves_no_trace():
    state = randomness.capture()
    with randomness.preserved():
        first = draw()
    assert draw() == first
    randomness.restore(state)


@pytest.mark.parametrize("streams", [randomness.STREAMS, ["torch"], ["python", "numpy"]])
def test_ranks_diverge_and_rank_0_does_not(fresh_seed, streams):
    with randomness.preserved():
        drawn = []
        for rank in range(3):
            randomness.seed_everything(fresh_seed)
            randomness.diverge(rank, streams)
            drawn.append(draw())
        randomness.seed_everything(fresh_seed)
        assert drawn[0] == draw()
        for name, values in zip(("python", "numpy", "torch"), zip(*drawn, strict=True), strict=True):
            assert len(set(values)) == (3 if name in streams else 1), name


def test_mix_depends_on_every_word_and_their_order():
    seen = {randomness.mix(a, b) for a in range(100) for b in range(100)}
    assert len(seen) == 10_000
    assert randomness.mix(1, 2) != randomness.mix(2, 1)
    assert all(0 <= value < 1 << 64 for value in seen)
    ones = sum(value.bit_count() for value in seen) / (64 * len(seen))
    assert abs(ones - 0.5) < 0.005


def _some(chance: random.Random) -> list[float]:
    """What some draws from the three streams give; of numpy's normal numbers the second may be left over."""
    kinds: list[Callable[[], float]] = [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: float(torch.rand(())),
        lambda: float(torch.randn(())),
        lambda: float(numpy.random.rand()),
        lambda: float(numpy.random.randn()),
    ]
    return [kind() for kind in chance.choices(kinds, k=chance.randint(0, 3))]


def test_streams_that_are_exchanged_are_those_of_two_processes(fresh_seed: int) -> None:
    """Drawn from in turns, the script's and a sampler's give what each gives alone."""

    def alone(key: int, seed: int) -> list[float]:
        chance = random.Random(seed)
        randomness.seed_streams(key)
        return [number for _ in range(300) for number in _some(chance)]

    with randomness.preserved():
        expected = alone(1, fresh_seed), alone(2, fresh_seed + 1)
        script, sampler, found = random.Random(fresh_seed), random.Random(fresh_seed + 1), ([], [])
        streams = randomness.OwnStreams(2)
        randomness.seed_streams(1)
        for _ in range(300):
            found[0].extend(_some(script))
            with streams.in_use():
                found[1].extend(_some(sampler))
    assert found == expected


def test_exchanged_streams_of_another_generator_of_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory isn't known: numpy's functions do it."""
    monkeypatch.setattr(randomness, "_can_copy_numpys", lambda: False)
    test_streams_that_are_exchanged_are_those_of_two_processes(5)
