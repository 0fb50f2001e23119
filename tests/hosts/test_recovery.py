"""`evenstep run --recover` on several hosts: a lost rank or host costs a step, and no checkpoint on disk is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.conftest import Host, Hosts

TRAINS = """
    import hashlib, os, pathlib, time
    import evenstep, torch

    with evenstep.init(seed=3, quiet=True, reproducible={reproducible}) as world:
        model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Dropout({dropout}), torch.nn.Linear(300, 4))
        model = evenstep.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(5))
        loader = evenstep.DataLoader(torch.utils.data.TensorDataset(inputs), global_batch_size=12, shuffle=True)
        checkpoint = evenstep.Checkpointer(
            {saved!r}, every_steps=1000, every_minutes=None, model=model, optimizer=optimizer, loader=loader
        )
        checkpoint.resume()
        began, size = checkpoint.num_steps, world.world_size
        for epoch in loader.epochs(3):
            for batch in loader:
                for (x,) in model.microbatches(batch) if {reproducible} else [batch]:
                    model.backward(model(x).square().mean(), weight=len(x))
                    if began == 0 and checkpoint.num_steps == 12 and world.rank in {die}:
                        os.kill(os.getpid(), 9)
                    if began in (12, 13) and checkpoint.num_steps == 20 and world.rank == {die_later}:
                        os.kill(os.getpid(), 9)
                optimizer.step()
                optimizer.zero_grad()
                checkpoint.step()
                if checkpoint.num_steps in (12, 30):
                    pathlib.Path(f"at-{{checkpoint.num_steps}}-{{size}}").touch()
                if size == {whole} or checkpoint.num_steps >= 30:
                    time.sleep({pause})  # until a host is lost, or has come
        values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        digest = hashlib.sha256(values).hexdigest()
        world.print(f"{{size}} ranks from step {{began}} to {{checkpoint.num_steps}}, {{digest}}")
"""


def script(
    saved: Path,
    *,
    die: tuple[int, ...] = (),
    die_later: int = -1,
    reproducible: bool = False,
    pause: float = 0.0,
    whole: int = 0,
) -> str:
    return TRAINS.format(
        saved=str(saved),
        die=die,
        die_later=die_later,
        reproducible=reproducible,
        pause=pause,
        whole=whole,
        dropout=0.0 if reproducible else 0.3,
    )


def errors(*hosts: Host) -> str:
    return "\n".join(host.stderr for host in hosts)


@pytest.mark.parametrize(("ranks_each", "die"), [(1, (1,)), (1, (0,)), (2, (1,)), (2, (2, 3))])
def test_lost_ranks_go_on_where_all_were(
    make_hosts: Callable[[int], Hosts], tmp_path: Path, ranks_each: int, die: tuple[int, ...]
) -> None:
    """Also their random streams where a survivor was on the same host; else, in reproducible mode, there are none."""
    flags = ["--nproc-per-node", str(ranks_each), "--recover", "replace"]
    ends = {}
    # A host that has no survivor takes the streams of its ranks with it.
    has_survivor = all(any(r not in die for r in range(h * ranks_each, (h + 1) * ranks_each)) for h in range(2))
    for name, dying in {"lost": die, "undisturbed": ()}.items():
        hosts = make_hosts(2)
        hosts.directory = tmp_path / name
        text = script(tmp_path / f"saved {name}", die=dying, reproducible=not has_survivor)
        started = [hosts.start(host, text, flags) for host in range(2)]
        assert [host.wait() for host in started] == [0, 0], errors(*started)
        ends[name] = started[0].stdout
        for host in started:
            # Step 13 is whole where a survivor has got all of its gradients.
            found = re.findall(r"recovery 1: all ranks go on from memory, at step 1[23]\n", host.stderr)
            assert len(found) == bool(dying), host.stderr
            assert "restarting all ranks" not in host.stderr
        hosts.__exit__(None, None, None)
    num = 2 * ranks_each
    assert re.match(rf"{num} ranks from step 1[23] to 60, ", ends["lost"]), ends
    assert ends["undisturbed"].startswith(f"{num} ranks from step 0 to 60, ")
    assert ends["lost"].split()[-1] == ends["undisturbed"].split()[-1]


def test_the_only_rank_of_one_host_and_then_that_of_the_other(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """The second time the only one that has the step is the one that was sent it the first time."""
    hosts = make_hosts(2)
    text = script(tmp_path / "saved", die=(1,), die_later=0, reproducible=True)
    started = [hosts.start(host, text, ["--recover", "replace"]) for host in range(2)]
    assert [host.wait() for host in started] == [0, 0], errors(*started)
    assert re.match(r"2 ranks from step 2[01] to 60, ", started[0].stdout), started[0].stdout
    for host in started:
        assert re.search(r"recovery 2: all ranks go on from memory, at step 2[01]\n", host.stderr), host.stderr
        assert "2 ranks were lost and replaced, 2 steps repeated at most" in host.stderr, host.stderr


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_host_is_cut_off_and_another_one_comes(
    make_hosts: Callable[..., Hosts], tmp_path: Path, num_hosts: int
) -> None:
    """Those that are left go on from memory; the lost one trains no more, and then a new one joins."""
    text = script(tmp_path / "saved", pause=0.7, whole=num_hosts)
    hosts = make_hosts(num_hosts)
    flags = [*hosts.elastic(f"{num_hosts - 1}:{num_hosts}"), "--recover", "replace"]
    *started, lost = (hosts.start(host, text, flags, static=False) for host in range(num_hosts))
    started[0].wait_until((started[0].directory / f"at-12-{num_hosts}").exists)
    hosts.cut(num_hosts - 1)
    started[0].wait_until((started[0].directory / f"at-30-{num_hosts - 1}").exists)
    assert lost.wait() != 0
    assert "recovery" not in lost.stderr, "it trains on without the others"
    assert "it or the way to it is lost" in lost.stderr
    for host in started:
        assert re.search(r"recovery 1: all ranks go on from memory, at step 1[2-9]\n", host.stderr), host.stderr
    hosts.mend(num_hosts - 1)
    late = hosts.start(num_hosts - 1, text, flags, static=False)
    assert {host.wait() for host in (*started, late)} == {0}, errors(*started, late)
    [line] = started[0].stdout.splitlines()
    assert re.match(rf"{num_hosts} ranks from step [3-5]\d to 60, ", line), line
