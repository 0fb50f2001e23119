"""`evenstep doctor` runs a script: the mistake that is planted in it is found there, and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from evenstep import world as worlds
from evenstep.errors import CollectiveTimeoutError
from evenstep.testing import RankPool
from evenstep.tools.doctor.examination import examine, read
from evenstep.tools.doctor.findings import Watched
from evenstep.tools.doctor.run.events import EventFile, Evidence, Plan
from evenstep.tools.doctor.run.runs import watch
from evenstep.tools.doctor.verdict import watched
from evenstep.tools.observing.patching import Patches
from tests.doctor_runs import FOUND, HANGS
from tests.procs.tools.verify.test_verify_ranks import free_port

NUM_STEPS = 8
CORPUS = Path(__file__).parents[3] / "scripts"
STUBS = Path(__file__).parents[3] / "stubs"  # of libraries that aren't installed where these tests run


def run_watched(script: str, plan: str, port: int) -> None:
    """On each rank of the pool: what `evenstep run` does with a script under watch, in a process that is kept."""
    from evenstep.tools.doctor.run.probe import Probe

    _forget_groups()  # of tests before this one
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    before, main, folder = dict(os.environ), sys.modules["__main__"], Path.cwd()
    os.chdir(Path(script).parent)  # what it saves by a relative path would be seen there
    sys.path.append(str(STUBS))
    probe = Probe(Plan.read(Path(plan)), int(os.environ["RANK"]), script)
    try:
        with Patches() as patches, contextlib.suppress(SystemExit, Exception):
            probe.install(patches)
            probe.run(script, [])
    finally:
        sys.modules["__main__"] = main
        sys.path.remove(str(Path(script).parent))
        sys.path.remove(str(STUBS))
        os.environ.clear()
        os.environ |= before
        os.chdir(folder)
        _forget_groups()


def _forget_groups() -> None:
    world = worlds.initialised()
    if world is not None:
        world.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def watch_on_pool(ranks: RankPool, text: str, directory: Path) -> Watched:
    """As `watch`, in milliseconds; without an end to hangs."""
    script = directory / "script.py"
    script.write_text(text)
    (directory / "run").mkdir()
    plan = Plan(str(directory / "run"), NUM_STEPS, 2)
    plan.write(directory / "plan.json")
    with contextlib.suppress(CollectiveTimeoutError):  # some versions of torch wait for themselves as a group ends
        ranks.run(run_watched, 2, str(script), str(directory / "plan.json"), free_port(), timeout_s=30.0)
    evidence = Evidence([EventFile(plan.file_of(rank)).read() for rank in range(2)])
    return watched(evidence, script=str(script), directory=str(directory), facts=read(script).facts)


def told(text: str, seen: Watched) -> list[tuple[str, str]]:
    """Findings as (rule, text of the line)."""
    lines = text.splitlines()
    return sorted({(each.rule, lines[each.line - 1].strip()) for each in seen.findings})


def assert_same(received: list[tuple[str, str]], expected: list[tuple[str, str]]) -> None:
    assert [rule for rule, _ in received] == [rule for rule, _ in expected], received
    for (_, line), (_, part) in zip(received, expected, strict=True):
        assert part in line


QUICK = {"clean", "no_sampler"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.extended) for name in FOUND]
)
def test_a_mistake_is_seen(name: str, ranks: RankPool, tmp_path: Path):
    text, expected = FOUND[name]
    seen = watch_on_pool(ranks, text, tmp_path)
    print(*seen.findings, *seen.notes, sep="\n")  # noqa: T201
    assert_same(told(text, seen), expected)
    assert not seen.notes
    assert seen.num_steps >= NUM_STEPS or name == "lengths"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plan.json", "run", "script.py"]


@pytest.mark.extended
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_ends_with_a_finding(name: str, tmp_path: Path):
    text, expected = HANGS[name]
    script = tmp_path / "script.py"
    script.write_text(text)
    evidence = watch(str(script), [], num_steps=NUM_STEPS, say=print)
    seen = watched(evidence, script=str(script), directory=str(Path.cwd()), facts=read(script).facts)
    print(*seen.findings, *seen.notes, sep="\n")  # noqa: T201
    assert_same(told(text, seen), expected)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("change", "rules", "said"),
    [
        (("", ""), [], "right as torch's DDP is; not one process's answer, because batch norm"),
        (("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) * (1 + 2 * rank)"), ["EV505"], "it differs"),
    ],
)
def test_where_nothing_is_found_it_is_compared_with_one_process(
    change: tuple[str, str], rules: list[str], said: str, tmp_path: Path
):
    text = FOUND["clean"][0].replace(*change) if change[0] else FOUND["clean"][0]
    text = text if not change[0] else text.replace("nn.BatchNorm1d(32), ", "")
    script = tmp_path / "script.py"
    script.write_text(text)
    report = examine(str(script), ignore=["EV105"], num_steps=NUM_STEPS)
    assert [each.rule for each in report.findings] == rules, report
    assert said in str(report.compared)
    assert all("loss.backward()" in text.splitlines()[each.line - 1] for each in report.findings)


PLANTED = {each.stem: each.read_text() for each in sorted((CORPUS / "planted").glob("*.py"))}
SEEN_ONLY = [name for name, text in PLANTED.items() if "seen by running only" in text.partition("\n")[0]]
# Of the others, which are read, those that run in a second or two on a CPU, with what this environment has.
CONFIRMED = [
    "gan_samples",
    "imagenet_padded_validation",
    "language_model_stream",
    "no_destroy",
    "trainer_module_prefix",
    "tutorial_no_sampler",
]
CLEAN = ["argparse_both_ways", "gan", "language_model_stream", "scheduler_of_local_batches", "spawn"]


@pytest.mark.extended
@pytest.mark.parametrize("name", [*SEEN_ONLY, *CONFIRMED])
def test_a_run_shows_what_is_planted(name: str, ranks: RankPool, tmp_path: Path):
    seen = watch_on_pool(ranks, PLANTED[name], tmp_path)
    rule, line = re.findall(r"# planted: (EV\d+), line (\d+)", PLANTED[name])[0]
    found = [(each.rule, each.line) for each in seen.findings]
    assert found == [(rule, int(line))] if name in SEEN_ONLY else {each for each, _ in found} == {rule}


@pytest.mark.extended
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_script_stays_clean_when_it_runs(name: str, ranks: RankPool, tmp_path: Path):
    seen = watch_on_pool(ranks, (CORPUS / "clean" / f"{name}.py").read_text(), tmp_path)
    assert seen.findings == []
    assert seen.num_steps > 1
