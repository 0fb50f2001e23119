"""The engine's steps in a profile of torch's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import evenstep


def ranges_of_a_step(sharded: bool, how: str, folder: str) -> dict[str, Any]:
    """Of one step under the profiler: by range how often, and what the buckets say of themselves."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(
        nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), bucket_cap_mb=0.4, first_bucket_cap_mb=0.4
    )
    kind = torch.optim.SGD
    optimizer = evenstep.ShardedOptimizer(model, kind, lr=0.1) if sharded else kind(model.parameters(), lr=0.1)

    def step() -> None:
        for part in model.microbatches(torch.ones(4, 300), 2) if how == "weighted" else [torch.ones(4, 300)]:
            loss = model(part).square().mean()
            if how == "weighted":
                model.backward(loss, weight=len(part))
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        step()
    step()
    events = profiled.events()
    counts: dict[str, int] = {}
    for each in events:
        if each.name.startswith(("evenstep:", "Optimizer.step")):
            counts[each.name] = counts.get(each.name, 0) + 1
    path = Path(folder) / f"{world.rank}.json"
    profiled.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())["traceEvents"]
    buckets = {each["name"]: each["args"]["Bytes"] for each in trace if "bucket " in each["name"]}
    return {"counts": counts, "buckets": buckets, "bytes": [each.flat.nbytes for each in model.engine.buckets]}


@pytest.mark.parametrize("how", ["plain", "weighted"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_profile_shows_the_parts_of_a_step_and_its_buckets(ranks, tmp_path, sharded, how):
    for told in ranks.run(ranges_of_a_step, 2, sharded, how, str(tmp_path)):
        counts, passes = told["counts"], 2 if how == "weighted" else 1
        assert counts.pop("evenstep:forward") == passes
        assert counts.pop("evenstep:backward") == passes
        assert counts.pop("evenstep:exchange") == counts.pop("evenstep:finish") == 1
        assert any("Optimizer.step" in name for name in counts)
        shown = {name: count for name, count in counts.items() if "evenstep:" in name}
        assert len(told["bytes"]) == 2
        expected = [f"evenstep:bucket {index}" for index in range(2)]
        if sharded:
            expected += [f"evenstep:parameters of bucket {index}" for index in range(2)]
        assert shown == dict.fromkeys(expected, 1)
        assert [told["buckets"][name] for name in expected[:2]] == told["bytes"]
