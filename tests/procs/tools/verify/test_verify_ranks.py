"""`evenstep verify`: silent on correct scripts, and right about what is wrong with the others."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evenstep import world as worlds
from evenstep.cli.main import main
from evenstep.testing import RankPool
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Recorder
from evenstep.tools.verify.double import InDouble
from evenstep.tools.verify.ranks import verify_ranks
from evenstep.tools.verify.report import Report
from tests import pages
from tests.procs.docs.test_readme import environment
from tests.verify_scripts import (
    CORRECT,
    FUSED,
    MISTAKES,
    NOT_REPRODUCIBLE,
    REPRODUCIBLE,
    SKIPS_ON_ALL,
    SKIPS_ON_SEVERAL,
)

Verify = Callable[[str, tuple[int, ...]], Report]


def run_script(script: str, plan: str, rehearsal: str, port: int) -> str:
    """On each rank of the pool: what `evenstep run` does with a script, in a process that is kept."""
    from evenstep.launcher.spawn.script_runner import _run_as_main
    from evenstep.tools.verify.rank import recording
    from evenstep.tools.verify.rehearsal import rehearsing

    forget_groups()  # of tests before this one
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    before, rank = sys.modules["__main__"], int(os.environ["RANK"])
    try:
        with (
            contextlib.suppress(SystemExit),
            Patches() as patches,
            recording(Path(plan), rank=rank),
            rehearsing(Path(rehearsal), rank=rank),
        ):
            _keep_groups(patches)
            _run_as_main(compile(Path(script).read_text(), script, "exec"), __file__=script)
    finally:
        sys.modules["__main__"] = before
        forget_groups()
    return ""


def forget_groups() -> None:
    """End the world and the group that a script has left in a process that is kept."""
    world = worlds.initialised()
    if world is not None:
        world.close()
    if dist.is_initialized():
        _KEPT.append(dist.group.WORLD)
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # what torch has cached of DTensors names the groups of the script before


def _keep_groups(patches: Patches) -> None:
    """A group that a script destroys lives on: with a model of torch's that outlives it, torch may hang at its end."""

    def made(original: Callable[..., None]) -> Callable[..., None]:
        def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
            _KEPT.append(group or dist.group.WORLD)
            original(group)

        return destroy_process_group

    patches.replace(dist, "destroy_process_group", made)


_KEPT: list[object] = []


def free_port() -> int:
    """One on which nobody listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


class OnPool:
    """Starts scripts on ranks that are kept: milliseconds instead of seconds."""

    def __init__(self, ranks: RankPool, script: Path) -> None:
        self.ranks, self.script = ranks, script

    def __call__(self, plan: Path, rehearsal: Path, num_ranks: int) -> tuple[int, str]:
        self.ranks.run(run_script, num_ranks, str(self.script), str(plan), str(rehearsal), free_port(), timeout_s=900.0)
        return 0, ""


@pytest.fixture
def verified(ranks: RankPool, tmp_path: Path) -> Verify:
    def verify(text: str, numbers: tuple[int, ...]) -> Report:
        script = tmp_path / "script.py"
        script.write_text(text)
        report = verify_ranks(str(script), [], ranks=numbers, say=print, start=OnPool(ranks, script))
        print(report.as_json())  # noqa: T201
        return report

    return verify


# The others take longer: all of them run on 1, 2 and 4 ranks with `make test-all`.
QUICK = {
    "random_split",
    "same_noise",
    "batch_statistics",
    "no_gradient",
    "torch_dropout",
    "fsdp",
    "evenstep_tokens",
    "batch_norm",
    "mean_of_means",
    "branch",
    "divisor",
    "not_wrapped",
    "learning_rate",
}


def cases(scripts: Iterable[str]) -> list[Any]:
    return [
        each
        for name in scripts
        for each in (
            [pytest.param(name, (1, 2), id=name)] * (name in QUICK)
            + [pytest.param(name, (1, 2, 4), id=f"{name}-4", marks=pytest.mark.extended)]
        )
    ]


@pytest.mark.parametrize(("name", "numbers"), cases(CORRECT))
def test_correct_scripts_are_let_alone(name: str, numbers: tuple[int, ...], verified: Verify):
    report = verified(CORRECT[name], numbers)
    assert report.is_fine
    assert all(run["verdict"] in ("equal", "identical") for run in json.loads(report.as_json())["runs"])


# Of each kind of cause, what the line says that is named.
LINES = {
    "average": ".backward()",
    "batch norm": "DistributedDataParallel(",
    "batch statistics": ".backward()",
    "branch": ".backward()",
    "divisor": ".backward()",
    "drift": "model.module(x)",
    "no gradient": "optimizer.step()",
    "not seeded": "DataLoader(",
    "random": "model(",
    "repeated": "DataLoader(",
    "settings": "optimizer.step()",
}
LOSES_WORK = {"average", "divisor", "drift", "no gradient", "repeated"}


@pytest.mark.parametrize(("name", "numbers"), cases(MISTAKES))
def test_mistakes_are_named(name: str, numbers: tuple[int, ...], verified: Verify):
    """On every number of ranks, and as the first cause of each."""
    kind, script = MISTAKES[name]
    report = verified(script, numbers)
    assert not report.is_fine
    assert [(verdict.causes[0].kind, verdict.is_fine) for verdict in report.verdicts] == [
        (kind, False) for _ in report.verdicts
    ]
    told = [cause for verdict in report.verdicts for cause in verdict.causes[1:]]
    assert all(cause.text.startswith("besides: ") for cause in told)
    for verdict in report.verdicts:
        cause = verdict.causes[0]
        assert Path(cause.path).name == "script.py"
        assert LINES[kind] in script.splitlines()[cause.line - 1], cause
        assert cause.is_note == (kind not in LOSES_WORK)


@pytest.mark.parametrize("script", [CORRECT["evenstep_scaler"], FUSED, SKIPS_ON_ALL], ids=["plain", "fused", "skips"])
def test_the_factor_of_a_scaler_is_no_rounding(script: str, verified: Verify):
    """Else a difference as large as that factor would be none."""
    (verdict,) = verified(script, (1, 2)).verdicts
    assert verdict.is_fine
    assert verdict.rounding is not None
    assert verdict.rounding < 1e-5


def test_steps_that_a_scaler_skips_on_one_number_of_ranks_are_a_difference(verified: Verify):
    (verdict,) = verified(SKIPS_ON_SEVERAL, (1, 2)).verdicts
    assert (verdict.word, verdict.causes[0].kind) == ("differs", "skipped")
    assert str(verdict.difference) == "before step 1 a GradScaler has skipped 1 step, and 0 on the fewest ranks"


def gloos_threads() -> int:
    return sum("gloo" in each.read_text() for each in Path("/proc/self/task").glob("*/comm"))


def threads_as_a_reducer_ends(directory: str) -> list[tuple[int, ...]]:
    """Of each of two process groups: when the reducer of torch's wrapper has just ended, and after that."""
    forget_groups()
    patches = Patches()
    Recorder(InDouble(patches)).install(patches)
    told: list[tuple[int, ...]] = []
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{directory}/{number}", rank=0, world_size=1)
        replica = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        replica(torch.zeros(1, 2)).sum().backward()
        before, ended = gloos_threads(), []
        weakref.finalize(replica.reducer, lambda ended=ended: ended.append(gloos_threads()))
        dist.destroy_process_group()
        del replica
        told.append((before, *ended, gloos_threads()))
    patches.restore()
    return told


def test_in_float64_gloo_outlives_the_reducer_of_torchs_wrapper(ranks: RankPool, tmp_path: Path):
    """The reducer would wait for a thread of Gloo's, and keep the interpreter's lock for which that thread waits."""
    # Of the first group of a process something in torch stays.
    _, (before, as_it_ended, after) = ranks.run(threads_as_a_reducer_ends, 1, str(tmp_path))[0]
    assert as_it_ended >= before  # a thread that one of Gloo's starts has the name of that
    assert after < as_it_ended


@pytest.mark.extended
def test_reproducible_mode_is_held_to_its_bits_and_the_virtual_rank_is_named(verified: Verify):
    report = verified(REPRODUCIBLE, (1, 2, 4))
    assert report.num_virtual_ranks == 8
    assert [verdict.word for verdict in report.verdicts] == ["identical", "identical"]
    report = verified(NOT_REPRODUCIBLE, (1, 2, 4))
    for verdict, virtual_rank in zip(report.verdicts, (4, 2), strict=True):
        assert verdict.difference is not None
        assert (verdict.difference.step, verdict.difference.virtual_rank) == (1, virtual_rank)
        assert verdict.causes[0].kind == "branch"


@pytest.mark.extended
def test_what_the_script_saves_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Or a trained model would be replaced by one of two steps, in float64."""
    (tmp_path / "train.py").write_text(
        """
import evenstep, json, torch
from pathlib import Path

with evenstep.init(seed=0, quiet=True) as world:
    model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = evenstep.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4)), global_batch_size=8)
    for (x,) in loader:
        model.backward(model(x).square().mean(), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
        if world.is_main:
            torch.save(model.state_dict(), "model.pt")
            Path("metrics.json").write_text(json.dumps({"loss": 1.0}))
            assert Path("metrics.json").read_text() == '{"loss": 1.0}'
        world.barrier()
        assert len(torch.load("model.pt")) == 2
"""
    )
    monkeypatch.chdir(tmp_path)
    torch.save({"trained": torch.ones(3)}, "model.pt")
    assert main(["verify", "--ranks", "1,2", "--steps", "2", "train.py"]) == 0
    assert torch.load("model.pt")["trained"].tolist() == [1.0] * 3
    assert sorted(os.listdir()) == ["model.pt", "train.py"]


SPAWNS = """
import torch.distributed as dist, torch.multiprocessing as mp

def set_up(rank):
    dist.init_process_group("gloo", rank=rank, world_size=1)

if __name__ == "__main__":
    mp.spawn(set_up, nprocs=1)
"""


@pytest.mark.extended
def test_a_script_that_fails_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('no such thing')")
    assert main(["verify", "--ranks", "1,2", str(script)]) == 2
    assert "no such thing" in capfd.readouterr().err
    script.write_text("")
    assert main(["verify", "--ranks", "1,2", str(script)]) == 2
    assert "has made no step" in capfd.readouterr().err
    script.write_text(SPAWNS)
    assert main(["verify", "--ranks", "1,2", str(script)]) == 2
    said = capfd.readouterr().err
    assert said.count("evenstep: ") == 1, said
    assert f"ConfigurationError: {script} starts its own ranks: " in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.py"], "no.py: no such script"),
        (["--ranks", "2", __file__], "--nproc-per-node 2: give two or more numbers of ranks"),
        (["--ranks", "0,2", __file__], "argument --nproc-per-node: '0' is less than 1"),
        (["--resume", "--ranks", "1,2", __file__], "--nproc-per-node 1,2: with --resume one number"),
        (["--resume", "no.py"], "no.py: no such script"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", *arguments]) == 78
    assert message in capsys.readouterr().err


@pytest.mark.extended
def test_the_page_is_true(tmp_path: Path):
    """docs/reference/verify.md: the JSON that it shows, of the tutorial's program."""
    (shown,) = pages.blocks("json", "reference/verify.md")
    (tmp_path / "train.py").write_text(pages.programs("tutorials/why-different.md")["train.py"])
    command = "evenstep verify --nproc-per-node 1,2 --steps 3 --json verdict.json train.py || test $? = 1"
    done = subprocess.run(
        ["bash", "-ec", command], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    told, shown = json.loads((tmp_path / "verdict.json").read_text()), json.loads(shown)
    assert "differs: step 1: loss is off by" in done.stdout
    assert "2 ranks: train.py:14: batch norm without synchronisation: '1'" in done.stdout
    assert told.keys() == shown.keys()
    (run,), (example,) = told["runs"], shown["runs"]
    assert run.keys() == example.keys()
    assert run["difference"].keys() == example["difference"].keys()
    assert run["verdict"] == example["verdict"]
    for key in ("kind", "line", "is_note"):
        assert run["causes"][0][key] == example["causes"][0][key]


SAVES_ITSELF = """
import evenstep, torch

with evenstep.init(seed=0, quiet=True):
    model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = evenstep.Checkpointer("runs", every_steps=EVERY, keep=1, model=model, optimizer=optimizer)
    checkpoint.resume()
    while checkpoint.num_steps < 12:
        model.backward(model(torch.ones(2, 2)).sum() + torch.rand(()).item())
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.step()
"""


@pytest.mark.extended
def test_a_save_of_the_scripts_own_before_the_kill_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "script.py").write_text(SAVES_ITSELF.replace("EVERY", "5"))
    arguments = ["verify", "--resume", "--nproc-per-node", "1", "--kill-at", "6", str(tmp_path / "script.py")]
    assert main(arguments) == 0, capsys.readouterr()
    assert "identical: steps 6 to 12" in capsys.readouterr().out


@pytest.mark.extended
def test_a_local_tier_is_the_runs_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What an earlier training left there isn't resumed from, and stays; of the run its newest step counts."""
    local = "local=Path(__file__).parent / 'fast', local_every_steps=1, model=model"
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n" + SAVES_ITSELF.replace("EVERY", "5").replace("model=model", local, 1)
    )
    arguments = ["verify", "--resume", "--nproc-per-node", "1", "--kill-at", "9", str(script)]
    assert main(arguments) == 0, capsys.readouterr()
    assert "identical: steps 9 to 12" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["script.py"]
