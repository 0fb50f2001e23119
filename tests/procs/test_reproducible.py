"""Reproducible mode: the same bits on any number of ranks.

What is compared are digests of losses, parameters, module buffers and optimizer state: see tests/reproducible_runs.py.
"""

from __future__ import annotations

from tests import reproducible_runs as runs

STEPS = 9  # among them a short last batch, and some steps behind it


def assert_same(found, expected, what):
    for rank, each in enumerate(found):
        assert each.keys() == expected.keys()
        differing = [name for name, value in expected.items() if each[name] != value]
        assert not differing, (
            f"{what}, rank {rank}: {len(differing)} of {len(expected)} differ, such as {differing[:6]}"
        )


def compare(ranks, run, sizes, *arguments, also=()):
    """A run on one rank against the same on others, and against others that are to be the same."""
    expected = ranks.run(run, 1, *arguments, timeout_s=150)[0]
    for nproc in sizes:
        assert_same(ranks.run(run, nproc, *arguments, timeout_s=150), expected, f"{nproc} ranks")
    for nproc, others in also:
        assert_same(ranks.run(run, nproc, *others, timeout_s=150), expected, f"{nproc} ranks with {others}")


def test_digits_with_batch_normalisation_dropout_and_augmentation(ranks, fresh_seed):
    also = [
        (2, (STEPS, fresh_seed, True)),  # the sharded optimizer against the plain one
        (1, (STEPS, fresh_seed, True)),
        (4, (STEPS, fresh_seed, False, "gloo")),
        (2, (STEPS, fresh_seed, False, None, 2)),  # augmented by workers
    ]
    compare(ranks, runs.digits, [2, 4], STEPS, fresh_seed, also=also)


def test_language_model_with_parts_of_lanes_clipping_and_autocast(ranks, fresh_seed):
    also = [
        (4, (STEPS, fresh_seed, {})),
        (2, (STEPS, fresh_seed, {"shard_gradients": True})),
        (2, (STEPS, fresh_seed, {}, "gloo")),
    ]
    compare(ranks, runs.language, [2, 4], STEPS, fresh_seed, also=also)
