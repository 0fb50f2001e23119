"""Memory that tensors have left stays with the process, unless the user has said otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evenstep.ground.environment import exported

# What a step does: several tensors below 32 MiB at once, all of them freed at its end.
_SCRIPT = """
import resource
import sys
import torch
from evenstep.ground.compat.c_library.heap import keep_freed_memory

told = keep_freed_memory() if sys.argv[1] == "keep" else None

def step():
    kept = [torch.ones(4 << 20) for _ in range(6)]

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> tuple[str, int]:
    ran = subprocess.run([sys.executable, "-c", _SCRIPT, mode], capture_output=True, text=True, timeout=120, check=True)
    told, faults = ran.stdout.split()
    return told, int(faults)


@pytest.mark.extended
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the thresholds are glibc's")
def test_a_step_finds_the_memory_of_the_one_before() -> None:
    told, kept = _faults("keep")
    if told != "True":
        pytest.skip("another C library than glibc")
    pages = 4 * 6 * (16 << 20) // 4096
    assert kept < pages // 50, f"{kept} page faults for {pages} pages that were there"
    # Left alone the heap keeps it too where something small happens to lie above the tensors: not every time.
    usual = [_faults("leave")[1]]
    while usual[-1] <= pages // 4 and len(usual) < 12:
        usual.append(_faults("leave")[1])
    assert usual[-1] > pages // 4, f"{usual} page faults for {pages} pages: the thresholds make no difference any more"


def test_what_the_user_has_set_stays() -> None:
    with exported({"MALLOC_TRIM_THRESHOLD_": "131072"}):
        told, _ = _faults("keep")
    assert told == "False"


_GIVE_BACK = """
import torch
from pathlib import Path
from evenstep.ground.compat.c_library.heap import give_back_freed_memory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

keep_freed_memory()
torch.ones(1 << 20)  # what torch loads and sets up with its first tensor stays
before = resident()
blocks = [torch.ones(4 << 20) for _ in range(6)]
last = torch.ones(1 << 10)  # at the end of the heap
del blocks
kept = resident() - before
give_back_freed_memory()
print(kept, resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the thresholds are glibc's")
def test_what_will_not_be_used_again_is_given_back() -> None:
    ran = subprocess.run([sys.executable, "-c", _GIVE_BACK], capture_output=True, text=True, timeout=120, check=True)
    kept, left = map(int, ran.stdout.split())
    if kept < 5 * (16 << 20):
        pytest.skip("this C library keeps nothing")
    assert left < 1 << 20, f"{left:,} bytes of {kept:,} are still there"
