"""Ends runs at random, and looks at what they say and leave: the right rank, the right status, nothing behind.

    python -m tests.faults.random_ends --runs 300              # `make stress PART=ends`
    python -m tests.faults.random_ends --runs 20 --hosts 3 --seed 7

On one host or on three, which network namespaces play, a rank is killed, suspended, frozen in C code, crashes, leaves
early or raises, in a step and at a moment of chance; or a launcher gets one of the signals that ask it to save and
stop. A third of the runs has workers of loaders, a third an exit handler that takes seconds, as a tracker's does, and
in a third the temporary directory is wiped before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from evenstep.ground.host.processes import children
from tests import namespaces
from tests.commands import processes_with
from tests.namespaces import Namespaces

TRAINS = """
import atexit, ctypes, json, os, shutil, signal, sys, time
import evenstep, torch

case = json.loads(sys.argv[1])


def strike(*_):
    if case["wiped"]:
        for name in os.listdir(os.environ["TMPDIR"]):
            path = os.path.join(os.environ["TMPDIR"], name)
            shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)
    open("struck", "w").close()
    if case["fault"] == "raise":
        raise ValueError("planted")
    if case["fault"] == "leaves":
        raise SystemExit(0)
    while case["fault"] == "frozen":  # a signal ends one sleep
        ctypes.PyDLL(None).sleep(1000)
    number = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "suspended": signal.SIGSTOP}[case["fault"]]
    os.kill(os.getpid(), number)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((8,), float(index)).sin()


with evenstep.init(seed=1, quiet=True) as world:
    if case["slow_exit"]:
        atexit.register(time.sleep, 2.5)
    torch.manual_seed(2)
    model = evenstep.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = evenstep.DataLoader(Samples(), global_batch_size=12, shuffle=True, num_workers=2 * case["workers"])
    checkpoint = evenstep.Checkpointer(
        case["saved"], every_steps=20, every_minutes=None, model=model, optimizer=optimizer, loader=loader
    )
    checkpoint.resume()
    for epoch in loader.epochs(100000):
        for x in loader:
            if world.rank == case["victim"] and checkpoint.num_steps == case["step"] and case["strikes"]:
                signal.signal(signal.SIGALRM, strike)
                signal.setitimer(signal.ITIMER_REAL, case["after_s"])
            model.backward(model(x).square().mean(), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            if checkpoint.num_steps == case["step"]:
                open(f"reached-{world.rank}", "w").close()
            time.sleep(0.003)
"""
FAULTS = {"kill": 137, "segfault": 139, "raise": 1, "leaves": 72, "suspended": 71, "frozen": 71}
STOPS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
BLAMED = re.compile(r"evenstep: rank (\d+)(?: on node \d+)? \(pid \d+\S* ?[^)]*\)")
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Case:
    """What happens in one run.

    Attributes:
        hosts: How many.
        ranks: On each.
        fault: One of `FAULTS`, or a signal to the launcher of the victim's host.
        victim: Its rank.
        step: After which it strikes.
        after_s: How long after.
        workers: Loaders have workers.
        slow_exit: Ranks have an exit handler that takes seconds.
        wiped: The temporary directory is emptied before.
    """

    hosts: int
    ranks: int
    fault: str
    victim: int
    step: int
    after_s: float
    workers: bool
    slow_exit: bool
    wiped: bool


def draw(chance: random.Random, num_hosts: int | None) -> Case:
    """A case of chance."""
    hosts = num_hosts or chance.choice([1, 1, 3])
    ranks = chance.choice([2, 3]) if hosts == 1 else 1
    return Case(
        hosts=hosts,
        ranks=ranks,
        # A rank that is frozen on a node of its own is named, and ended by the collective's deadline of ten minutes.
        fault=chance.choice([*FAULTS, *STOPS] if hosts == 1 else [*sorted(set(FAULTS) - {"frozen"}), *STOPS[:2]]),
        victim=chance.randrange(hosts * ranks),
        step=chance.randrange(1, 40),
        after_s=chance.uniform(0.001, 0.1),
        workers=chance.random() < 0.34,
        slow_exit=chance.random() < 0.34,
        wiped=chance.random() < 0.34,
    )


class Run:
    """One run, with its launchers, in a directory of its own."""

    def __init__(self, case: Case, directory: Path, hosts: Namespaces | None) -> None:
        self.case, self.directory = case, directory
        self.mark = uuid.uuid4().hex
        self._shm = set(os.listdir("/dev/shm"))
        text = json.dumps({**asdict(case), "strikes": case.fault in FAULTS, "saved": str(directory / "saved")})
        flags = ["--nproc-per-node", str(case.ranks), "--threads-per-rank", "1", "--device", "cpu"]
        flags += ["--stopped-grace", "1", "--phase-timeout", "step=2", "--shutdown-timeout", "10"]
        self.launchers = []
        for host in range(case.hosts):
            folder = directory / f"host{host}"
            (folder / "tmp").mkdir(parents=True)
            (folder / "script.py").write_text(TRAINS)
            arguments = [*flags, "script.py", text]
            alone = [sys.executable, "-m", "evenstep", "run", *arguments]
            env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PET_", "GLOO", "TP_"))}
            env |= {"TMPDIR": str(folder / "tmp"), "EVENSTEP_TEST_MARK": self.mark}
            with (folder / "said").open("wb") as out:
                self.launchers.append(
                    subprocess.Popen(
                        alone if hosts is None else hosts.evenstep_run(host, arguments),
                        cwd=folder,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                    )
                )

    def said(self) -> str:
        """By all launchers."""
        return "\n".join(
            f"-- host {host}\n{(self.directory / f'host{host}/said').read_text()}" for host in range(self.case.hosts)
        )

    def stop(self) -> None:
        """Send the launcher of the victim's host its signal, once the victim has come to the step."""
        host = self.case.victim // self.case.ranks
        deadline = time.monotonic() + DEADLINE_S
        reached = self.directory / f"host{host}/reached-{self.case.victim}"
        while not reached.exists():
            assert time.monotonic() < deadline, "it did not get there"
            time.sleep(0.01)
        time.sleep(self.case.after_s)
        pid = self.launchers[host].pid
        if self.case.hosts > 1:  # ip and unshare have become one process, whose child is the launcher
            (pid,) = children(pid)
        os.kill(pid, getattr(signal, self.case.fault))

    def wait(self) -> list[int]:
        """The exit status of each launcher."""
        deadline = time.monotonic() + DEADLINE_S
        return [launcher.wait(max(0.1, deadline - time.monotonic())) for launcher in self.launchers]

    def processes(self) -> list[int]:
        """All alive that the run has started, however far down."""
        return processes_with(self.mark)

    def left(self) -> list[str]:
        """What is there two seconds after the end. Logs of a failed run are kept on purpose."""
        deadline = time.monotonic() + 2.0
        while (pids := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_text()!r}" for pid in pids]
        left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self._shm if "mp-" not in name]
        for path in self.directory.glob("host*/tmp/*"):
            if not path.name.startswith(("evenstep-logs-", "torchinductor")):
                left.append(str(path))
        return left

    def kill(self) -> None:
        """Whatever is left."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()


def problems(run: Run) -> list[str]:
    """What is wrong with how it ends; empty: nothing."""
    case = run.case
    try:
        if case.fault in STOPS:
            run.stop()
        statuses = [128 - status if status < 0 else status for status in run.wait()]
    except (AssertionError, subprocess.TimeoutExpired) as error:
        # Frozen inside a call it looks as if it waited: it is named with its line, and the call's deadline ends it.
        if case.fault == "frozen" and re.search(rf"rank {case.victim} waits in .* in strike", run.said()):
            return []
        # Python drops what a signal's handler raises inside a hook around a fork; then the run just goes on.
        if case.fault in ("raise", "leaves") and "Exception ignored in" in run.said():
            return []
        return [f"hangs: {error}"]
    found = []
    expected = 75 if case.fault in STOPS else FAULTS[case.fault]
    own = statuses[case.victim // case.ranks]
    if own != expected or any(status not in (expected, 76) for status in statuses):
        found.append(f"status {statuses}, not {expected}")
    said = run.said()
    if case.fault in STOPS:
        verify = [sys.executable, "-m", "evenstep", "checkpoint", "verify", str(run.directory / "saved")]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            found.append(f"the checkpoint of the stop: {done.stdout}{done.stderr}")
    else:
        named = {int(rank) for rank in BLAMED.findall(said)}
        if case.fault == "leaves":  # the comparison at its end may meet another call of the ranks on other hosts
            met = r"rank (\d+): (?:all_gather of int64 \[1\]|the end of the loop)"
            named |= {int(rank) for rank in re.findall(met, said)}
        if case.victim not in named:
            found.append(f"rank {case.victim} isn't named: {named}")
        if case.fault == "raise" and not (
            "ValueError: planted" in said and 'script.py", line 2' in said.replace("1", "2")
        ):
            found.append("the line isn't named")
    return found + [f"left behind: {each}" for each in run.left()]


def main() -> int:
    """Exit status 0: nothing was wrong in any run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--hosts", type=int, choices=(1, 3), help="of each run (default: either)")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    args = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and then in the runs, too
    reason = namespaces.why_not()
    num_hosts = args.hosts if reason is None else 1
    print(f"seed {args.seed}{'' if reason is None else f'; one host: {reason}'}", flush=True)  # noqa: T201
    chance, wrong, done = random.Random(args.seed), 0, Counter()
    for number in range(args.runs):
        case = draw(chance, num_hosts)
        with tempfile.TemporaryDirectory(prefix="ends-", ignore_cleanup_errors=True) as name:
            hosts = None if case.hosts == 1 else Namespaces(case.hosts)
            try:
                if hosts is not None:
                    hosts.__enter__()
                run = Run(case, Path(name), hosts)
                found = problems(run)
                if found:
                    print(f"run {number}: {case}: {found}\n{textwrap.indent(run.said(), '    ')}", flush=True)  # noqa: T201
                run.kill()
            finally:
                if hosts is not None:
                    hosts.__exit__(None, None, None)
        wrong += bool(found)
        done[f"{case.hosts} hosts, {case.fault}"] += 1
    print(f"{args.runs} runs, {wrong} of them wrong: {dict(sorted(done.items()))}")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
