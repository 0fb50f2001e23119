"""The record of the last calls, beside that of torch's own Gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep.transport.core import flight_recorder
from evenstep.transport.core.flight_recorder import RecordedGroup, describe_calls, explain_file, record
from evenstep.transport.core.header import DTYPES, Fingerprint

# In a process of its own: torch reads the variable when it makes its recorder.
_TORCHS = """
import json, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float16):
    dist.all_reduce(torch.ones(3, 4).to(dtype)) if dtype not in (torch.bool, torch.complex64) else dist.broadcast(
        torch.ones(3, 4).to(dtype), 0)
print(_dump_fr_trace_json().decode())
"""


@pytest.fixture(autouse=True)
def no_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flight_recorder._calls.clear()
    monkeypatch.setattr(flight_recorder, "_files", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", raising=False)


def recorded() -> dict[str, Any]:
    """Three calls: one ended, one begun, one waiting for its turn."""
    group = RecordedGroup("a group", "shared memory", 2)
    record(group, 1, Fingerprint("all_reduce", "sum", torch.float32, (3, 4)).pack())
    record(group, 2, Fingerprint("all_gather", None, torch.bfloat16, (5,)).pack())
    record(group, 3, Fingerprint("reduce_scatter", "sum", torch.int64, (6,)))
    group.num_completed, group.num_started, group.timeout_s = 1, 2, 1.5
    return describe_calls()


def test_it_has_the_form_of_torchs_own() -> None:
    variables = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}
    run = subprocess.run(
        [sys.executable, "-c", _TORCHS], env=variables, capture_output=True, text=True, timeout=100, check=True
    )
    theirs, ours = json.loads(run.stdout), recorded()
    if not theirs.get("entries"):
        pytest.skip("this torch records no calls of Gloo")
    same = {"version", "pg_config", "pg_status", "entries"}
    assert same <= set(ours)
    assert same <= set(theirs)
    assert ours["version"] == theirs["version"]
    entry = ours["entries"][0]
    shown = {key: value for key, value in theirs["entries"][0].items() if not key.startswith("thread_")}
    shown.pop("frames", None)
    assert {key: type(value) for key, value in entry.items()} == {key: type(value) for key, value in shown.items()}
    assert entry["input_sizes"] == shown["input_sizes"] == [[3, 4]]
    for part in ("pg_status", "pg_config"):
        assert next(iter(ours[part].values())).keys() == next(iter(theirs[part].values())).keys()
    names = {each["input_dtypes"][0] for each in theirs["entries"]}
    assert names <= set(flight_recorder._TYPE_NAMES.values())


def test_each_dtype_has_a_name() -> None:
    newer = {"bcomplex32"}  # from torch 2.15 on
    assert set(flight_recorder._TYPE_NAMES) - newer == {str(dtype)[6:] for dtype in DTYPES} - newer


def test_states_and_shapes() -> None:
    told = recorded()
    assert [each["state"] for each in told["entries"]] == ["completed", "started", "scheduled"]
    assert [each["output_sizes"] for each in told["entries"]] == [[[3, 4]], [[2, 5]], [[3]]]
    (status,) = told["pg_status"].values()
    assert status == {
        "last_enqueued_collective": "3",
        "last_started_collective": "2",
        "last_completed_collective": "1",
    }
    assert told["pg_config"]["a group"]["ranks"] == "[0, 1]"


def test_only_the_last_calls_stay() -> None:
    group = RecordedGroup("a group", "gloo", 2)
    packed = Fingerprint("barrier", None, torch.uint8, ()).pack()
    for number in range(1, 2502):
        record(group, number, packed)
    entries = describe_calls()["entries"]
    assert (len(entries), entries[0]["collective_seq_id"], entries[-1]["collective_seq_id"]) == (2000, 502, 2501)


def test_the_file_is_written_where_torchs_variables_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert explain_file(3) == "", "there were no calls"
    recorded()
    first = explain_file(3)
    path = Path(first.rpartition(": ")[2])
    assert path.parent == tmp_path
    assert "rank-3" in path.name
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(json.loads(path.read_text())["entries"]) == 3
    assert explain_file(3) == first, "one file for each process"
    for variable in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.setenv(variable, str(tmp_path / f"{variable}_"))
        explain_file(3)
        assert len(json.loads((tmp_path / f"{variable}_3").read_text())["entries"]) == 3


def test_a_place_that_refuses_it_hides_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded()
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "none" / "of"))
    assert "could not be written" in explain_file(0)
