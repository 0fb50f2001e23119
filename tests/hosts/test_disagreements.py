"""Between hosts: ranks that call different things; and sums that are those of one host."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.hosts.conftest import Hosts

CALLS = """
    import evenstep, torch
    import torch.distributed as dist

    with evenstep.init(seed=3, timeout_s=20) as world:
        odd = world.rank == world.world_size - 1
        for numel in (3, 100_000):
            dist.all_reduce(torch.ones(numel))
            world.transport.all_reduce(torch.ones(numel)).wait()
        {call}
        print("went on", flush=True)
        world.barrier()
"""

MISMATCHES = {
    "numel": ("dist.all_reduce(torch.ones(4 if odd else 3))", r"float32 \[4\]"),
    "long": ("dist.all_reduce(torch.ones(900_001 if odd else 900_000))", r"float32 \[900001\]"),
    "short against long": ("dist.all_reduce(torch.ones(900_000 if odd else 3))", r"float32 \[900000\]"),
    "shape": ("dist.all_reduce(torch.ones((2, 3) if odd else (3, 2)))", r"float32 \[2, 3\]"),
    "dtype": ("dist.all_reduce(torch.ones(3, dtype=torch.int32 if odd else torch.float32))", r"int32 \[3\]"),
    "collective": (
        "dist.broadcast(torch.ones(3), 0) if odd else dist.all_reduce(torch.ones(3))",
        r"broadcast from rank 0 of float32 \[3\]",
    ),
    "order": (
        "for numel in ((90_000, 3) if odd else (3, 90_000)): dist.all_reduce(torch.ones(numel))",
        r"float32 \[90000\]",
    ),
    "on the world's transport": (
        "world.transport.all_reduce(torch.ones(900_000 if odd else 3)).wait()",
        r"float32 \[900000\]",
    ),
}


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("fault", MISMATCHES)
def test_ranks_of_two_hosts_that_call_different_things_end_with_72(
    make_hosts: Callable[[int], Hosts], fault: str, ranks_per_host: int
) -> None:
    """On both hosts, with the call of the odd rank; Gloo aborts the process (134)."""
    call, words = MISMATCHES[fault]
    hosts = make_hosts(2)
    flags = ["--nproc-per-node", str(ranks_per_host)]
    started = [hosts.start(host, CALLS.replace("{call}", call), flags) for host in range(2)]
    for host in started:
        assert host.wait() == 72, host.stderr
        assert "went on" not in host.stdout
    for host in started:
        assert "SIGABRT" not in host.stderr
    said = started[0].stderr + started[1].stderr
    assert "MismatchError: the ranks disagree in collective number " in said
    assert re.search(rf"rank {2 * ranks_per_host - 1}: .*{words}", said), said


TRAINS = """
    import evenstep, torch
    import torch.distributed as dist

    with evenstep.init(seed=3, timeout_s=10) as world:
        odd = world.rank == world.world_size - 1
        models = [evenstep.DistributedDataParallel(torch.nn.Linear(8, 4 + each)) for each in range(2)]
        for step in range(4):
            {before}
            for model in models[::-1] if {swaps} and odd and step == 2 else models:
                model.backward(model(torch.ones(2, 8)).square().mean())
                model.zero_grad()
        print("went on", flush=True)
"""


@pytest.mark.parametrize(
    ("before", "swaps"),
    [("if odd and step == 2: dist.all_reduce(torch.ones(3))", False), ("pass", True)],
    ids=["a bucket against dist.all_reduce", "two models in other orders"],
)
def test_ranks_that_wait_in_different_groups_end_by_their_deadline_and_not_by_sigabrt(
    make_hosts: Callable[[int], Hosts], before: str, swaps: bool
) -> None:
    """As on one host: no message says what another group is asked for."""
    hosts = make_hosts(2)
    script = TRAINS.replace("{before}", before).replace("{swaps}", str(swaps))
    started = [hosts.start(host, script, ["--nproc-per-node", "2"]) for host in range(2)]
    statuses = {host.wait() for host in started}
    for host in started:
        assert "went on" not in host.stdout
        assert "SIGABRT" not in host.stderr
    assert statuses == {71}, started[0].stderr + started[1].stderr


REPRODUCES = """
    import hashlib, pathlib
    import evenstep, torch

    seed = {seed}
    with evenstep.init(seed=seed, reproducible=True, virtual_ranks=8) as world:
        layers = [torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 701), torch.nn.Linear(701, 3)]
        model = evenstep.DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        inputs = torch.randn(8, 3, 2, 64, generator=torch.Generator().manual_seed(seed))
        share = 8 // world.world_size
        for step in range(3):
            rows = inputs[world.rank * share : (world.rank + 1) * share, step].reshape(-1, 64)
            for part in model.microbatches(rows):
                model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        raw = b"".join(p.detach().double().numpy().tobytes() for p in model.parameters())
        said = f"{world.world_size} ranks, {world.transport_name}: {hashlib.sha256(raw).hexdigest()}"
        pathlib.Path(f"digest-{world.rank}").write_text(said)
"""


def test_four_hosts_compute_the_bits_of_one(make_hosts: Callable[[int], Hosts], fresh_seed: int) -> None:
    """Reproducible mode on four hosts of two ranks each, against one process."""
    script = REPRODUCES.replace("{seed}", str(fresh_seed))
    hosts = make_hosts(4)
    started = [hosts.start(host, script, ["--nproc-per-node", "2"]) for host in range(4)]
    for host in started:
        assert host.wait() == 0, host.stderr
    told = [path.read_text() for host in started for path in host.directory.glob("digest-*")]
    subprocess.run([sys.executable, "script.py"], cwd=started[0].directory, check=True)
    _, _, digest = (started[0].directory / "digest-0").read_text().partition("1 ranks, local: ")
    assert len(digest) == 2 * hashlib.sha256().digest_size
    assert told == [f"8 ranks, shared memory + gloo: {digest}"] * 8
