"""`TMPDIR` on a full disk, and `TMPDIR` emptied by somebody while a run goes."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import Command, call, start

TRAINS = """
    import evenstep, torch
    import torch.nn.functional as F

    def main():
        with evenstep.init(seed=0) as world:
            model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            samples = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
            for x, y in evenstep.DataLoader(samples, global_batch_size=8):
                model.backward(F.cross_entropy(model(x), y), weight=len(x))
                optimizer.step()
                optimizer.zero_grad()

    main()
"""
PLAIN = """
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    loader = DataLoader(samples, batch_size=8)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Where `Command` has its temporary directory: a file system of 1 MiB with 8 KiB free."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    disk = tmp_path / "tmp"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        (disk / "of somebody else").write_bytes(bytes(1016 << 10))
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


RUN = ["--nproc-per-node", "2", "--device", "cpu"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_shown_where_the_disk_of_the_temporary_directory_is_full(full_disk: Path, rank: int) -> None:
    script = TRAINS.replace(
        "optimizer.step()", f"optimizer.step()\n{' ' * 16}if world.rank == {rank}: raise KeyError(1)"
    )
    code, command = call(full_disk, [*RUN, "--log-dir", "logs", "script.py"], script)
    assert code == 1
    assert "KeyError: 1\nevenstep: rank" in command.stderr, command.stderr
    assert command.stderr.splitlines()[-1].startswith(f"evenstep: rank {rank} (pid ")
    assert command.stderr.splitlines()[-1].endswith(") failed: KeyError: 1")


@pytest.mark.parametrize(
    ("arguments", "script"),
    [
        (["run", *RUN], TRAINS),
        (["verify"], TRAINS),
        (["convert", "--verify"], PLAIN),
        (["bench", "run"], TRAINS),
        (["estimate"], PLAIN),
    ],
    ids=["run", "verify", "convert", "bench", "estimate"],
)
def test_a_command_that_finds_no_room_says_so_in_one_line(full_disk: Path, arguments: list[str], script: str) -> None:
    """Their status for a difference, or for a script that fails, would be believed."""
    (full_disk / "script.py").write_text(textwrap.dedent(script))
    command = Command(full_disk, [*arguments, "script.py"])
    assert command.wait() == 78, command.stderr
    assert "Traceback" not in command.stderr
    # Libraries may write lines of their own as the process ends, such as nanobind's with torch 2.15.
    said = [line for line in command.stderr.splitlines() if line.startswith("evenstep: ")]
    assert "No space left on device" in said[-1]
    assert str(command.temporary) in said[-1]
    assert "TMPDIR" in said[-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_after_the_temporary_directory_was_emptied_is_shown_and_its_rank_named(
    tmp_path: Path, rank: int
) -> None:
    script = f"""
        import os, time
        import evenstep, torch
        from torch.distributed.elastic.multiprocessing.errors import record

        @record  # writes torchelastic's error file first
        def main():
            with evenstep.init() as world:
                world.transport.all_reduce(torch.ones(10)).wait()
                open(f"up-{{world.rank}}", "w").close()
                while not os.path.exists("emptied"):
                    time.sleep(0.02)
                if world.rank == {rank}:
                    raise ValueError("bad sample")
                world.transport.all_reduce(torch.ones(10)).wait()

        main()
    """
    command = start(tmp_path, [*RUN, "script.py"], script)
    command.wait_until(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(2)))
    for left in command.temporary.iterdir():
        shutil.rmtree(left)
    (tmp_path / "emptied").touch()
    assert command.wait() == 1
    assert command.stderr.count("Traceback") == 1
    assert "ValueError: bad sample\nevenstep: rank" in command.stderr
    last = command.stderr.splitlines()[-1]
    assert last.startswith(f"evenstep: rank {rank} (pid ")
    assert last.endswith(") failed: ValueError: bad sample")
    assert command.leaves_no_process()
