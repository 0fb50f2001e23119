"""Limits that control groups set to this process's memory and CPU time. Linux; elsewhere there are none.

A process is limited by its own group and by all groups around it: those of a container, Slurm or systemd, for example.
Both versions of control groups are read; a system may have both.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as its largest number
_V2 = ""  # version 2's single hierarchy has no name in /proc/PID/cgroup


def memory_limit_bytes(process: Path = _PROCESS) -> int | None:
    """The memory that the control groups allow to all their processes together; None: there is no limit.

    Args:
        process: The process's folder in /proc.
    """
    return min((limit for limit, _ in _memory(process)), default=None)


def free_memory_bytes(process: Path = _PROCESS) -> int | None:
    """The memory that the control groups still allow; None: there is no limit.

    Args:
        process: The process's folder in /proc.
    """
    return min((max(0, limit - used) for limit, used in _memory(process)), default=None)


def cpu_limit(process: Path = _PROCESS) -> float | None:
    """The average number of CPUs that the control groups allow to their processes; None: there is no limit.

    Args:
        process: The process's folder in /proc.
    """
    return min(_cpus(process), default=None)


def count_cpus() -> int:
    """The number of logical CPUs that this process may use, by its affinity and its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, math.ceil(cpu_limit() or allowed))


def _memory(process: Path) -> Iterator[tuple[int, int]]:
    """(limit, memory in use that the kernel can't take back), in bytes, of each group that has a limit."""
    for group, is_v2 in _groups(process, "memory"):
        limit, used = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            # Leave out the page cache. It counts as used, and grows to the group's limit while a data set is read, but
            # the kernel takes it back when memory is needed. A node's `MemAvailable` counts it as available, too.
            cached = ("inactive_file", "active_file") if is_v2 else ("total_inactive_file", "total_active_file")
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            in_use = int((group / used).read_text()) - sum(int(stat.get(name, 0)) for name in cached)
            limit_bytes = int((group / limit).read_text())
        except (OSError, ValueError):  # the root group, which has no limit; or the text "max"
            continue
        if limit_bytes < _NO_LIMIT_BYTES:
            yield limit_bytes, in_use


def _cpus(process: Path) -> Iterator[float]:
    """The CPU limit of each group that has one."""
    for group, is_v2 in _groups(process, "cpu"):
        try:
            if is_v2:
                quota, period = map(int, (group / "cpu.max").read_text().split())
            else:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:  # in version 1, -1 means no limit
            yield quota / period


def _groups(process: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """(Folder, whether it is of version 2) of each group that may limit a resource, from the process's own outward."""
    try:
        memberships = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {name: path for _, names, path in (line.split(":", 2) for line in memberships) for name in names.split(",")}
    for line in mounts:
        mounted, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        is_v2 = kind == "cgroup2"
        if not is_v2 and not (kind == "cgroup" and controller in options.split(",")):
            continue
        root, mountpoint = (_unescaped(each) for each in mounted.split(" ")[3:5])
        path = paths.get(_V2 if is_v2 else controller)
        if path is not None:
            inside = _relative(path, root)
            for each in (inside, *inside.parents):
                yield Path(mountpoint) / each, is_v2


def _relative(path: str, root: str) -> PurePosixPath:
    """A group's path below the mounted group; the mounted group itself if the process is outside of it."""
    try:
        inside = PurePosixPath(path).relative_to(root)
    except ValueError:
        return PurePosixPath()
    return PurePosixPath() if ".." in inside.parts else inside


def _unescaped(text: str) -> str:
    """A path as the kernel writes it into a table: a space, for example, is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
