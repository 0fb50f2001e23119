"""What all tests share: ranks, fresh random inputs, a guard against what is left behind, an account of skips."""

from __future__ import annotations

import inspect
import os
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import torch

from evenstep.testing import RankPool
from tests.ranks import call_on_rank

_POOL = pytest.StashKey[RankPool]()
_TOLD = pytest.StashKey[tuple[int, int]]()
_SETTLE_S = 3.0
_SETTLE_BESIDE_OTHERS_S = 30.0  # for files in /dev/shm of another pytest process, whose killed ranks end in their time
_NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # torch sets the latter when it first needs dynamo

# Under nohup, or behind a shell's `&`, they are ignored, also by what tests start; tests that play nohup ignore them.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test process has one of two cores. torch's second thread would make each small operation wait for the other one.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# No test is timed: on a busy machine an example may take as long as it likes.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    """`ranks.run(fn, nproc, *args)`: what fn returned on each rank. The processes are kept between tests."""
    with RankPool() as pool:
        pytestconfig.stash[_POOL] = pool
        yield pool


@pytest.fixture
def world() -> None:
    """Of a test that runs on ranks (`tests.ranks.on_ranks`): each has its own."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that runs on ranks its numbers of ranks."""
    mark = metafunc.definition.get_closest_marker("on_ranks")
    if mark is not None:
        metafunc.fixturenames.append("nproc")
        metafunc.parametrize("nproc", mark.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test that runs on ranks there."""
    if pyfuncitem.get_closest_marker("on_ranks") is None:
        return None
    given = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters if name != "world"
    }
    pool = pyfuncitem.config.stash[_POOL]
    pool.run(call_on_rank, pyfuncitem.callspec.params["nproc"], pyfuncitem.obj, given)
    return True


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pytest's, but short: the path of a Unix socket, such as a loader's worker makes beneath it, holds 108 bytes."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def fresh_seed() -> int:
    """A new seed each time; printed, and so shown when the test fails. EVENSTEP_TEST_SEED repeats one."""
    given = os.environ.get("EVENSTEP_TEST_SEED")
    seed = int(given) if given else secrets.randbits(31)
    print(f"EVENSTEP_TEST_SEED={seed}")  # noqa: T201
    return seed


@dataclass(frozen=True)
class Traces:
    """What a test can leave behind in this process and on this host."""

    processes: frozenset[str]
    threads: frozenset[str]
    shared_memory: frozenset[str]
    variables: frozenset[tuple[str, str]]
    listening_sockets: frozenset[str]
    process_group: frozenset[str]
    current_world: frozenset[str]

    def left_since(self, before: Traces) -> dict[str, set[object]]:
        """What is here and was not before, by kind; of variables also those that have gone."""
        found: dict[str, set[object]] = {}
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            difference = now ^ then if field.name == "variables" else now - then
            if difference:
                found[field.name] = set(difference)
        return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """Divide the tests into the part that a person runs and the rest."""
    text = "core: what `make test` runs; rest: what `make test-all` runs; without it, both"
    parser.addoption("--part", choices=["core", "rest"], help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what belongs to the other part."""
    part = config.getoption("--part")
    if part is not None:
        divided: dict[bool, list[pytest.Item]] = {False: [], True: []}
        numbers: Counter[str] = Counter()
        for item in items:
            test, _, _ = item.nodeid.partition("[")
            numbers[test] += 1
            divided[_is_extended(item, numbers[test])].append(item)
        config.hook.pytest_deselected(items=divided[part == "core"])
        items[:] = divided[part == "rest"]


def _is_extended(item: pytest.Item, number: int) -> bool:
    """Whether a test is marked `extended`, with all its cases or those behind some; see `markers` in pyproject.toml."""
    num_ranks = getattr(item, "callspec", None) and item.callspec.params.get("nproc", 0)  # type: ignore[attr-defined]
    return any(
        (num_ranks or 0) >= mark.kwargs.get("ranks", 0) and number > mark.kwargs.get("beyond", 0)
        for mark in item.iter_markers("extended")
    )


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail a test that leaves a process, thread, segment, variable, socket, process group or world behind."""
    before = _look_around(pytestconfig)
    yield
    began = time.monotonic()
    while left := _look_around(pytestconfig).left_since(before):
        settle_s = _SETTLE_S
        if left.keys() == {"shared_memory"}:
            settle_s = _SETTLE_BESIDE_OTHERS_S if "PYTEST_XDIST_WORKER" in os.environ else _SETTLE_S
            left["shared_memory"] = {name for name in left["shared_memory"] if not _used_by_strangers(str(name))}
            if not left["shared_memory"]:
                return
        if time.monotonic() > began + settle_s:
            told = "; ".join(f"{kind}: {', '.join(map(str, sorted(what, key=str)))}" for kind, what in left.items())
            pytest.fail(f"the test left behind: {told}", pytrace=False)
        time.sleep(0.05)


def _look_around(config: pytest.Config) -> Traces:
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    world = getattr(sys.modules.get("evenstep.world"), "_current", None)
    shm = Path("/dev/shm")
    return Traces(
        processes=frozenset(_children(config)),
        # fsspec's own, which it keeps for the next call, end with this process.
        threads=frozenset(
            f"{thread.name} ({thread.ident})"
            for thread in threading.enumerate()
            if thread.name != "fsspecIO" and not thread.name.startswith("asyncio_")
        ),
        shared_memory=frozenset(path.name for path in shm.iterdir()) if shm.is_dir() else frozenset(),
        variables=frozenset((k, v) for k, v in os.environ.items() if k not in _NOT_OURS),
        listening_sockets=frozenset(_listening()),
        process_group=frozenset({"torch.distributed is initialised"} if has_group else ()),
        current_world=frozenset({repr(world)} if world is not None else ()),
    )


def _children(config: pytest.Config) -> Iterator[str]:
    pool = config.stash.get(_POOL, None)
    for pid in _child_pids() - (pool.pids if pool is not None else set()):
        try:
            command = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:
            continue
        # Started by multiprocessing with its first "spawn", and by the first call of the command, they end with this
        # process. And the guard of the pool's ranks, which ends with them.
        if pool is not None and pool.pids & {int(word) for word in command.split() if word.isdigit()}:
            continue
        if "multiprocessing.resource_tracker" not in command and "tests.launcher_server" not in command:
            yield f"{pid} {command}"


def _child_pids() -> set[int]:
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:
        return {child.pid for child in psutil.Process().children()}
    pids: set[int] = set()
    for path in lists:
        try:
            pids |= {int(pid) for pid in path.read_text().split()}
        except OSError:  # the thread has ended
            continue
    return pids


def _listening() -> Iterator[str]:
    for connection in psutil.Process().net_connections(kind="inet"):
        if connection.status == psutil.CONN_LISTEN:
            yield f"{connection.laddr}"


def _used_by_strangers(name: str) -> bool:
    """Whether a file in /dev/shm is in use by a process that is no descendant of this one: not the test's, then.

    multiprocessing keeps the names of its semaphores for a while after the processes that used them. So beside another
    pytest process one that nobody of ours uses is a stranger's, too.
    """
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    is_semaphore = name.startswith("sem.mp-") and "PYTEST_XDIST_WORKER" in os.environ
    for process in Path("/proc").glob("[0-9]*"):
        if (int(process.name) in ours) is not is_semaphore:
            continue
        try:
            if f"/dev/shm/{name}" in (process / "maps").read_text():
                return not is_semaphore
        except OSError:
            continue
    return is_semaphore


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells its account; `pytest_testnodedown` hears it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["pool"] = _account(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what the workers tell."""
    told = getattr(node, "workeroutput", {}).get("pool", (0, 0))
    before = _account(node.config)
    node.config.stash[_TOLD] = (before[0] + told[0], before[1] + told[1])


def _account(config: pytest.Config) -> tuple[int, int]:
    """(multi-rank cases, groups of ranks), in this process or told by its workers."""
    pool = config.stash.get(_POOL, None)
    return config.stash.get(_TOLD, (0, 0)) if pool is None else (pool.num_cases, pool.num_groups)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How many multi-rank cases ran, and what was skipped and why, with counts."""
    num_cases, num_groups = _account(config)
    terminalreporter.write_line(f"{num_cases} multi-rank cases ran on {num_groups} groups of ranks")
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in skipped
    )
    terminalreporter.write_line(f"{len(skipped)} tests skipped" + (":" if skipped else ""))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} x {reason}")
