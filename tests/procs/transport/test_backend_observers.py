"""Collectives of the backend in torch's own tools, beside Gloo's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from tests.procs.transport.test_backend import all_gather_single, both_groups, reduce_scatter_single


def calls_of(group: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    size, ones = group.size(), torch.ones
    parts = [ones(5) for _ in range(size)]
    return {
        "all_reduce": lambda: dist.all_reduce(ones(3, 4), group=group),
        "broadcast": lambda: dist.broadcast(ones(7), group_src=0, group=group),
        "reduce": lambda: dist.reduce(ones(7), group_dst=0, group=group),
        "all_gather": lambda: dist.all_gather(parts, ones(5), group=group),
        "all_gather_single": lambda: all_gather_single(ones(size * 5), ones(5), group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(ones(5), parts, group=group),
        "reduce_scatter_single": lambda: reduce_scatter_single(ones(5), ones(size * 5), group=group),
        "gather": lambda: dist.gather(ones(5), parts if group.rank() == 0 else None, group_dst=0, group=group),
        "scatter": lambda: dist.scatter(ones(5), parts if group.rank() == 0 else None, group_src=0, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(ones(size * 2), ones(size * 2), group=group),
        "barrier": lambda: dist.barrier(group=group),
    }


def counts_of(run: Callable[[], Any]) -> dict[str, int]:
    """What the mode has counted: of each operation how often."""
    with CommDebugMode() as mode:
        run()
    return {str(operation): count for operation, count in mode.get_comm_counts().items()}


def counted_beside_gloo() -> list[tuple[str, dict[str, int], dict[str, int]]]:
    with both_groups() as groups:
        theirs, ours = map(calls_of, groups)
        return [(name, counts_of(theirs[name]), counts_of(ours[name])) for name in ours]


def test_comm_debug_mode_counts_as_over_gloo(ranks):
    for told in ranks.run(counted_beside_gloo, 2):
        assert sum(sum(theirs.values()) for _, theirs, _ in told) == len(told) - 1, "it counts no barriers"
        assert [ours for _, _, ours in told] == [theirs for _, theirs, _ in told]


def events_of(directory: str) -> list[dict[str, Any]]:
    """Of each call alone, what the chrome trace says."""
    events = []
    with both_groups() as (_, group):
        for name, run in calls_of(group).items():
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
                run()
            path = Path(directory) / f"{name}-{group.rank()}.json"
            profiled.export_chrome_trace(str(path))
            shown = [each for each in json.loads(path.read_text())["traceEvents"] if "evenstep:" in each["name"]]
            events += [
                {"call": name, "Group": group.group_name, "name": each["name"], **each["args"]} for each in shown
            ]
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            works = [dist.all_reduce(torch.ones(9), group=group, async_op=True) for _ in range(3)]
            for work in reversed(works):
                work.wait()
        events += [{"call": "async", "name": each.key, "count": each.count} for each in profiled.key_averages()]
    return events


def test_a_profile_shows_each_call_with_its_shapes_and_bytes(ranks, tmp_path):
    for events in ranks.run(events_of, 2, str(tmp_path)):
        shown = [each for each in events if each["call"] != "async"]
        assert [each["name"] for each in shown] == [f"evenstep:{each['call']}" for each in shown]
        assert len(shown) == 11
        first = shown[0]
        assert first["Input Dims"] == [[3, 4]]
        assert first["Input type"] == ["float"]
        assert (first["Bytes"], first["Group size"]) == (48, 2)
        assert first["Process Group Name"] == first["Group"]
        assert [each["Seq"] for each in shown] == list(range(first["Seq"], first["Seq"] + 11))
        assert [each["count"] for each in events if each["name"] == "evenstep:all_reduce" and "count" in each] == [3]


# ---------------------------------------------------------------------- torch's debug level
