"""Reproducible mode on a GPU: the same bits twice, and on another number of ranks that share it over Gloo."""

from __future__ import annotations

import pytest
import torch

import evenstep
from tests import reproducible_runs as runs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@pytest.mark.parametrize("run", [runs.digits, runs.language])
def test_bits_on_a_gpu(fresh_seed, run):
    sharded = True if run is runs.digits else {}

    def on(nproc, *options):
        return evenstep.launch(
            run, nproc=nproc, args=(9, fresh_seed, *options), kwargs={"device": "cuda:0"}, device="cuda:0"
        )

    expected = on(1)
    for found in (on(1), on(2), on(4), on(2, sharded)):
        differing = [name for name, value in expected.items() if found[name] != value]
        assert not differing, f"{len(differing)} of {len(expected)} differ, such as {differing[:6]}"
