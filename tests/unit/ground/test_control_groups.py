"""Limits of control groups, read from made-up systems: both versions, nested groups, containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.ground.host import control_groups
from evenstep.ground.host.control_groups import count_cpus, cpu_limit, free_memory_bytes, memory_limit_bytes

GIB = 1 << 30


class System:
    """A process's folder in /proc, and the control groups that it names."""

    def __init__(self, root: Path) -> None:
        self.process = root / "self"
        self.process.mkdir()
        self.groups = root / "sys fs cgroup"
        self.mounts = ["22 1 0:21 / /proc rw shared:1 - proc proc rw"]

    def belongs(self, *lines: str) -> None:
        (self.process / "cgroup").write_text("".join(f"{line}\n" for line in lines))
        (self.process / "mountinfo").write_text("".join(f"{line}\n" for line in self.mounts))

    def mount(self, kind: str, place: str = "", root: str = "/", options: str = "rw") -> None:
        where = str(self.groups / place).replace(" ", "\\040")
        self.mounts.append(f"30 22 0:26 {root} {where} rw,nosuid shared:9 - {kind} cgroup {options}")

    def group(self, path: str, **files: int | str) -> None:
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def stat(inactive: int, active: int = 0, prefix: str = "") -> str:
    return f"anon 12345\nshmem 777\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}"


def test_the_page_cache_is_not_in_use(system: System) -> None:
    """In a container (a namespace of control groups) the process's group looks like the root of all."""
    system.mount("cgroup2")
    system.belongs("0::/")
    system.group(
        "",
        memory__max=4 * GIB,
        memory__current=4 * GIB - 4096,
        memory__stat=stat(2 * GIB, GIB),
        cpu__max="150000 100000",
    )
    assert memory_limit_bytes(system.process) == 4 * GIB
    assert free_memory_bytes(system.process) == 3 * GIB + 4096
    assert cpu_limit(system.process) == 1.5


def test_the_tightest_of_nested_groups_counts(system: System) -> None:
    """As under Slurm: the job's limit stands above the step's and the task's, which have none of their own."""
    system.mount("cgroup2")
    system.belongs("0::/system.slice/slurm/job_7/step_0/task_1")
    system.group("")
    system.group(
        "system.slice", memory__max="max", memory__current=60 * GIB, memory__stat=stat(0), cpu__max="max 100000"
    )
    job = "system.slice/slurm/job_7"
    system.group(
        job, memory__max=8 * GIB, memory__current=7 * GIB, memory__stat=stat(5 * GIB), cpu__max="200000 100000"
    )
    system.group(f"{job}/step_0", memory__max=16 * GIB, memory__current=GIB, memory__stat=stat(0), cpu__max="9 1")
    system.group(f"{job}/step_0/task_1", cpu__max="max 100000")
    system.group(
        "system.slice/slurm/job_8", memory__max=5, memory__current=5, memory__stat=stat(0), cpu__max="1 100000"
    )
    assert memory_limit_bytes(system.process) == 8 * GIB
    assert free_memory_bytes(system.process) == 6 * GIB
    assert cpu_limit(system.process) == 2.0


def test_version_1_has_a_hierarchy_for_each_resource(system: System) -> None:
    system.mount("cgroup", "memory", options="rw,memory")
    system.mount("cgroup", "cpu,cpuacct", options="rw,cpu,cpuacct")
    system.mount("cgroup2", "unified")
    system.belongs("4:memory:/slurm/job_7", "2:cpu,cpuacct:/slurm", "1:name=systemd:/init.scope", "0::/init.scope")
    system.group(
        "memory",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=GIB,
        memory__stat=stat(0, prefix="total_"),
    )
    system.group(
        "memory/slurm/job_7",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=2 * GIB,
        memory__stat=stat(GIB, prefix="total_") + "\ninactive_file 0",
    )
    system.group("cpu,cpuacct", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    system.group("cpu,cpuacct/slurm", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    assert memory_limit_bytes(system.process) == 2 * GIB
    assert free_memory_bytes(system.process) == GIB
    assert cpu_limit(system.process) == 0.5


@pytest.mark.parametrize(
    ("root", "path"),
    [("/docker/abc", "/docker/abc"), ("/docker/abc", "/docker/abc/inner"), ("/", "/../../elsewhere"), ("/x", "/y/z")],
)
def test_a_container_sees_its_own_part_of_the_tree(system: System, root: str, path: str) -> None:
    """What is mounted is the container's group: the process is in it, below it, or, seen from there, outside."""
    system.mount("cgroup2", root=root)
    system.belongs(f"0::{path}")
    system.group("", memory__max=GIB, memory__current=GIB // 2, memory__stat=stat(0))
    assert free_memory_bytes(system.process) == GIB // 2


def test_without_groups_or_limits_there_are_none(system: System) -> None:
    assert memory_limit_bytes(system.process) is None  # no /proc
    system.belongs()
    assert (free_memory_bytes(system.process), cpu_limit(system.process)) == (None, None)
    system.mount("cgroup2")
    system.belongs("0::/a.scope")
    system.group("a.scope", memory__max="max", memory__current=GIB, memory__stat=stat(0), cpu__max="max 100000")
    assert (free_memory_bytes(system.process), cpu_limit(system.process)) == (None, None)


@pytest.mark.parametrize(("limit", "expected"), [(None, 4), (1.5, 2), (0.2, 1), (64.0, 4)])
def test_cpus_are_those_of_the_affinity_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, expected: int
) -> None:
    monkeypatch.setattr(control_groups, "cpu_limit", lambda: limit)
    monkeypatch.setattr(control_groups.os, "sched_getaffinity", lambda pid: {0, 2, 4, 6}, raising=False)
    assert count_cpus() == expected
