"""The last calls of this process, over all of its transports; written to a file when a call times out.

The file has the form of torch's own flight recorder (`_dump_fr_trace_json`, version 2.10). Before a time-out a call
costs an append to a ring, and two numbers that say how far the calls of its transport have come.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from evenstep import environment
from evenstep.transport.core.header import Fingerprint

NUM_CALLS = 2000
_VERSION = "2.10"

# Of a dtype, what torch's recorder calls it.
_TYPE_NAMES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "complex32": "ComplexHalf",
    "bcomplex32": "BComplex32",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
}

_ids = itertools.count()


class RecordedGroup:
    """The ranks of one transport, as the record knows them.

    Args:
        name: The group's, equal on all ranks.
        description: What carries its calls.
        world_size: Number of ranks.

    Attributes:
        name: Of the group.
        ranks: Their numbers in the world, as far as they are known; else from 0.
        timeout_s: Deadline of a call.
        num_started: The other ranks can see so many calls of this one.
        num_completed: So many calls have ended, the first ones.
        unfinished: Of a transport whose calls may end in any order: those that haven't.
    """

    def __init__(self, name: str, description: str, world_size: int) -> None:
        self.name = name
        self.description = description
        self.ranks: Sequence[int] = range(world_size)
        self.timeout_s = 0.0
        self.num_started = 0
        self.num_completed = 0
        self.unfinished: set[int] = set()
        self.id = next(_ids)

    def state_of(self, number: int) -> str:
        """How far call `number`, from 1, has come, in torch's words."""
        if number <= self.num_completed and number not in self.unfinished:
            return "completed"
        return "started" if number <= self.num_started else "scheduled"

    def __repr__(self) -> str:
        return f"<RecordedGroup {self.name} of {len(self.ranks)} ranks, {self.description}>"


# (group, number of the call from 1, packed or unpacked fingerprint, time in ns): the oldest is dropped.
_calls: collections.deque[tuple[RecordedGroup, int, bytes | Fingerprint, int]] = collections.deque(maxlen=NUM_CALLS)
_append = _calls.append
_now_ns = time.time_ns
_files: dict[int, str] = {}  # by process: its file in the temporary directory


def record(group: RecordedGroup, number: int, call: bytes | Fingerprint) -> None:
    """Remember a call as it is launched.

    Args:
        group: Whose.
        number: From 1, in its transport.
        call: Its fingerprint.
    """
    _append((group, number, call, _now_ns()))


def describe_calls() -> dict[str, Any]:
    """The recorded calls in the form of torch's flight recorder: plain values."""
    calls = _copy()
    groups = {each[0].id: each[0] for each in calls}
    entries = [_entry(index, *call) for index, call in enumerate(calls)]
    status: dict[str, dict[str, str]] = {}
    for each in entries:
        last = status.setdefault(str(each["pg_id"]), dict.fromkeys(_LAST.values(), "-1"))
        for state, key in _LAST.items():
            if _STATES.index(each["state"]) >= _STATES.index(state):
                last[key] = str(each["collective_seq_id"])
    return {
        "version": _VERSION,
        "comm_lib_version": "",
        "nccl_comm_state": {},
        "pg_config": {
            group.name: {"name": group.name, "desc": group.description, "ranks": str(list(group.ranks))}
            for group in groups.values()
        },
        "pg_status": status,
        "entries": entries,
    }


def _copy() -> list[tuple[RecordedGroup, int, bytes | Fingerprint, int]]:
    while True:
        try:
            return list(_calls)
        except RuntimeError:  # another thread has launched a call meanwhile
            continue


_STATES = ("scheduled", "started", "completed")
_LAST = dict(
    zip(_STATES, ("last_enqueued_collective", "last_started_collective", "last_completed_collective"), strict=True)
)


def _entry(index: int, group: RecordedGroup, number: int, call: bytes | Fingerprint, created_ns: int) -> dict[str, Any]:
    made = Fingerprint.unpack(call) if isinstance(call, bytes) else call
    dtype = str(made.dtype)[6:]
    state = group.state_of(number)
    return {
        "record_id": index,
        "pg_id": group.id,
        "process_group": [group.name, group.description],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"evenstep:{made.collective}",
        "time_created_ns": created_ns,
        "input_sizes": [list(made.shape)],
        "input_dtypes": [_TYPE_NAMES.get(dtype, dtype)],
        "output_sizes": [_output_shape(made, len(group.ranks))],
        "output_dtypes": [_TYPE_NAMES.get(dtype, dtype)],
        "state": state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": state == "completed",
        "timeout_ms": int(group.timeout_s * 1000),
        "is_p2p": False,
    }


def _output_shape(made: Fingerprint, world_size: int) -> list[int]:
    numel = math.prod(made.shape)
    if made.collective == "all_gather":
        return [world_size, *made.shape]
    if made.collective == "reduce_scatter":
        return [numel // world_size]
    return list(made.shape)


def explain_file(rank: int) -> str:
    """Write the file; a sentence for an error's message that names it, or says why there is none. Never raises.

    Args:
        rank: This rank, where torch doesn't know its number in the world.
    """
    if not _calls:
        return ""
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    try:
        path = _write(rank, json.dumps(describe_calls()))
    except OSError as error:
        return f" The last calls could not be written: {error.strerror or error}."
    return f" The last {min(len(_calls), NUM_CALLS):,} calls of this rank: {path}"


def _write(rank: int, text: str) -> str:
    prefix = environment.flight_recorder_prefix()
    given = None if prefix is None else f"{prefix}{rank}"
    path = given or _files.get(os.getpid())
    directory = os.path.dirname(os.path.abspath(given)) if given else None
    # First beside the place, then renamed: whoever reads meanwhile finds all of it or what was there before.
    fd, temporary = tempfile.mkstemp(prefix=f"evenstep-calls-of-rank-{rank}-", suffix=".json", dir=directory)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        if path is None:
            path = _files[os.getpid()] = temporary
        else:
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def _forget() -> None:
    _calls.clear()  # the calls were the parent's


os.register_at_fork(after_in_child=_forget)
