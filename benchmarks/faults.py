"""Faults at every phase, rank and transport: what is noticed when, which rank is named, what is lost or left behind.

    python benchmarks/faults.py                                 # torch's DDP under torchrun beside it
    python benchmarks/faults.py --small --no-ddp --recoveries 3    # one victim, one transport

What has been run is in the JSON file after every run, and in the tables if it is interrupted.

The record of a run has, in seconds after the fault: when a surviving rank noticed, when the screen named a rank, when
the launcher had ended; which rank was named; the exit status; what is left of processes, of files in /dev/shm and in
the temporary directory. Runs with restarts also record how soon the next step was taken, how many steps were made
twice, and whether any sample was lost or used twice in the history that counts.

`make stress PART=ends` has random faults on more ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from measuring import describe_machine, markdown, parser_of, write_json

sys.path.append(str(Path(__file__).parents[1]))  # where `tests` is, also when this runs from elsewhere
from tests.commands import processes_with

SCRIPT = str(Path(__file__).with_name("faulty_training.py"))
PHASES = ("forward", "backward", "optimizer")
KINDS = ("kill", "raise", "exit", "segfault", "stop", "hang", "shape", "close")
# What the run must end with; where more than one is right, all of them.
STATUS = {"kill": {137}, "raise": {1}, "exit": {72}, "segfault": {139}, "stop": {71}, "hang": {71}, "shape": {72}}
STATUS["close"] = {134, 139, 76}  # Gloo aborts, or crashes
_BLAMED = (
    re.compile(r"evenstep: (?:rank (\d+) \(pid \d+\) (?:failed|was killed|exited|had|is stopped|is in|is between))"),
    re.compile(r"rank\s*: (\d+) \(local_rank"),  # torchrun's summary
)
_DISAGREE = re.compile(r"the ranks disagree")
_DEADLINE_S = 120.0
_DDP_TIMEOUT_S = 10.0  # torch's own deadline is 1800 s; more than ten times what a step takes here


@dataclass
class Outcome:
    """One run. Times in seconds after the fault; NaN: never."""

    side: str
    fault: str
    transport: str
    victim: int
    noticed_s: float = math.nan
    named_s: float = math.nan
    ended_s: float = math.nan
    named_rank: int | None = None
    status: int | None = None
    left: list[str] = field(default_factory=list)
    recovered_s: float = math.nan
    steps_twice: int = 0
    samples_wrong: int = 0
    last_line: str = ""

    @property
    def kind(self) -> str:
        """The fault's name."""
        return self.fault.partition(":")[0]

    @property
    def is_right(self) -> bool:
        """Whether the victim was named. Where ranks disagree, none is: both calls are shown."""
        return self.named_rank == self.victim or (self.kind == "shape" and _DISAGREE.search(self.last_line) is not None)


class Call:
    """A launcher, watched: the time of every line on its screen, and every process that it has started."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._directory, self.temporary = directory, directory / "tmp"
        self.temporary.mkdir()
        self.lines: list[tuple[float, str]] = []
        self._before = set(os.listdir("/dev/shm")) | set(os.listdir(directory))
        # The name of the directory is in the environment of all processes that this call starts, however far down.
        variables = os.environ | {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=directory, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self) -> tuple[int | None, float]:
        """(Exit status, when); None if it takes too long, and is killed."""
        try:
            status: int | None = self.process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            status = None
        ended = time.monotonic()
        if status is None:
            for pid in self.processes():
                os.kill(pid, 9)
            self.process.wait()
        self._reader.join(5)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()
        return status, ended

    def processes(self) -> list[int]:
        """All that are alive."""
        return processes_with(str(self.temporary))

    def left(self) -> list[str]:
        """What is left behind a second after the end; logs of a failed run are kept on purpose.

        Processes, with what they listen on; segments in /dev/shm; sockets and files in the temporary directory and
        where the run was started.
        """
        deadline = time.monotonic() + 1.0
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = []
        for pid in found:
            ports = [each.laddr.port for each in psutil.Process(pid).net_connections() if each.status == "LISTEN"]
            left.append(f"process {pid}" + (f" on port {', '.join(map(str, sorted(ports)))}" if ports else ""))
        # Semaphores of multiprocessing are other programs': there are no workers here.
        kept = ("evenstep-logs-", "torchelastic_", "torchinductor", "sem.mp-")
        for folder in (Path("/dev/shm"), self._directory, self.temporary):
            for path in folder.iterdir():
                if path.name not in self._before | {"tmp"} and not path.name.startswith(kept):
                    left.append(f"{'socket' if path.is_socket() else 'file'} {path}")
        return left

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))


def run(side: str, fault: str, *, transport: str = "shared memory", victim: int = 1, restarts: int = 0) -> Outcome:
    """One fault, on one side."""
    outcome = Outcome(side, fault, transport, victim)
    directory = Path(tempfile.mkdtemp(prefix="bench-faults-"))
    try:
        diary = directory / "diary"
        diary.mkdir()
        target = [SCRIPT, "--diary", str(diary), "--fault", fault]
        if side == "ddp":
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            target += ["--engine", "ddp", "--ddp-timeout-s", str(_DDP_TIMEOUT_S)]
        else:
            flags = f"--device cpu --stopped-grace 0 --phase-timeout step=1 --max-restarts {restarts}"
            command = ["-m", "evenstep", "run", "--nproc-per-node", "2", *flags.split()]
            target += ["--transport", transport, "--save-every", "4" if restarts else "0"]
        call = Call([sys.executable, *command, *target], directory)
        status, ended = call.wait()
        outcome.status = 128 - status if status is not None and status < 0 else status
        struck = _time(diary / "fault")
        outcome.ended_s = ended - struck if outcome.status is not None else math.nan
        noticed = [_time(path) for path in diary.glob("noticed-*") if path.name != f"noticed-{victim}"]
        outcome.noticed_s = min(noticed, default=math.nan) - struck
        named = [(at, int(found[1])) for at, line in call.lines if (found := _named_rank(line))]
        if named:
            outcome.named_s, outcome.named_rank = named[-1][0] - struck, named[-1][1]
        disagree = next(((at, line) for at, line in call.lines if _DISAGREE.search(line)), None)
        if disagree is not None:
            outcome.named_s, outcome.last_line = disagree[0] - struck, disagree[1]
        elif call.lines:
            outcome.last_line = call.lines[-1][1]
        outcome.left = call.left()
        if restarts:
            _read_diary(diary, struck, outcome)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


def _named_rank(line: str) -> re.Match[str] | None:
    return next((found for pattern in _BLAMED if (found := pattern.search(line))), None)


def _time(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return math.nan


def _read_diary(diary: Path, struck: float, outcome: Outcome) -> None:
    """How soon it went on, and whether the history that counts has each sample once per epoch."""
    taken: dict[int, dict[int, dict[int, list[int]]]] = {}  # by attempt, step, rank
    first = math.inf
    for path in diary.glob("steps-*"):
        _, attempt, rank = path.name.split("-")
        for line in path.read_text().splitlines():
            step, samples, at = line.split(" ")
            numbers = [int(s) for s in samples.split(",") if s]
            taken.setdefault(int(attempt), {}).setdefault(int(step), {})[int(rank)] = numbers
            if int(attempt) == 1:
                first = min(first, float(at))
    outcome.recovered_s = first - struck
    before, after = taken.get(0, {}), taken.get(1, {})
    outcome.steps_twice = len(before.keys() & after.keys())
    counts = {step: ranks for step, ranks in before.items() if step < min(after, default=0)} | after
    used = Counter(s for step in sorted(counts) for numbers in counts[step].values() for s in numbers)
    in_all, num_samples = sum(used.values()), 96
    expected = {in_all // num_samples, -(-in_all // num_samples)}
    missing = num_samples - len(used) if in_all >= num_samples else 0
    outcome.samples_wrong = missing + sum(count not in expected for count in used.values())


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that so many of them don't exceed; NaN of nothing. Pure."""
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def table(outcomes: Sequence[Outcome]) -> str:
    """A row per side and kind of fault. Pure."""
    rows = []
    for side, kind in dict.fromkeys((each.side, each.kind) for each in outcomes):
        group = [each for each in outcomes if (each.side, each.kind) == (side, kind)]
        times = [_spread(getattr(o, name) for o in group) for name in ("noticed_s", "named_s", "ended_s")]
        right = sum(each.is_right for each in group)
        none = sum(each.named_rank is None and not each.is_right for each in group)
        counts = [right, len(group) - right - none, none, _statuses(group), sum(len(each.left) for each in group)]
        rows.append([side, kind, len(group), *times, *counts])
    times = "noticed by a peer | named | ended"
    return markdown(f"side | fault | runs | {times} | right rank named | wrong | none | status | left behind", rows, 2)


def recovery_table(outcomes: Sequence[Outcome]) -> str:
    """A row per kind of fault, of runs with restarts. Pure."""
    rows = []
    for kind in [*dict.fromkeys(each.kind for each in outcomes), ""]:
        group = [each for each in outcomes if kind in ("", each.kind)]
        cells = [kind or "all", len(group), _spread(each.recovered_s for each in group)]
        cells += [max(each.steps_twice for each in group), sum(each.samples_wrong for each in group), _statuses(group)]
        rows.append([*cells, sum(len(each.left) for each in group)])
    columns = "next step after | steps made twice, most | samples lost or repeated | status | left behind"
    return markdown(f"fault | runs | {columns}", rows)


def _spread(values: Iterable[float]) -> str:
    """p50 / p99 / max."""
    known = list(values)
    return " / ".join(_seconds(percentile(known, share)) for share in (0.5, 0.99, 1.0))


def _statuses(group: Sequence[Outcome]) -> str:
    return ", ".join(f"{status} ({n})" for status, n in Counter(each.status for each in group).items())


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def fault_text(kind: str, rank: int, step: int, phase: str) -> str:
    """A fault as `faulty_training.py` reads it. Pure."""
    return f"{kind}:rank={rank},step={step},phase={phase}"


@dataclass(frozen=True)
class Planned:
    """One run to make: which table it belongs to, and the arguments of `run`."""

    part: str
    side: str
    fault: str
    transport: str = "shared memory"
    victim: int = 1
    restarts: int = 0


def plan(args: argparse.Namespace, draw: random.Random) -> list[Planned]:
    """All runs, in order: the same ones for the same seed. Pure, but for what is drawn."""
    planned: list[Planned] = []
    for _ in range(args.repeats):
        for kind in args.kinds:
            for phase in args.phases:
                for victim in (1,) if args.small else (0, 1):
                    fault = fault_text(kind, victim, draw.randrange(2, 30), phase)
                    for transport in ("shared memory",) if args.small else ("shared memory", "gloo"):
                        if kind != "shape" or transport == "shared memory":  # over Gloo it is what Gloo makes of it
                            planned.append(Planned("matrix", "evenstep", fault, transport, victim=victim))
                    if not args.no_ddp and kind != "shape":
                        planned.append(Planned("matrix", "ddp", fault, "gloo", victim=victim))
    deaths = ["kill", "raise", "exit", "segfault"]
    for _ in range(args.recoveries):
        victim = draw.randrange(2)
        fault = fault_text(draw.choice(deaths), victim, draw.randrange(5, 30), draw.choice(PHASES))
        planned.append(Planned("recoveries", "evenstep", fault, victim=victim, restarts=1))
    return planned


def is_well(outcome: Outcome) -> bool:
    """Whether a run of ours ended as it should: one with a restart as if nothing had happened."""
    if outcome.left or outcome.samples_wrong:
        return False
    if not math.isnan(outcome.recovered_s):
        return outcome.status == 0
    return outcome.is_right and outcome.status in STATUS[outcome.kind]


def report(found: dict[str, list[Outcome]]) -> str:
    """The tables of what has been run. Pure."""
    texts = []
    if found["matrix"]:
        texts.append(table(found["matrix"]))
    if found["recoveries"]:
        texts.append(f"{len(found['recoveries'])} recoveries\n\n{recovery_table(found['recoveries'])}")
    return "Seconds after the fault: p50 / p99 / max.\n\n" + "\n\n".join(texts)


def main() -> None:
    """Run what is planned; print tables, also where that is interrupted."""
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="one victim and one transport")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--phases", nargs="*", default=list(PHASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--recoveries", type=int, default=20)
    parser.add_argument("--no-ddp", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    args = parser.parse_args()
    planned = plan(args, random.Random(args.seed))
    print(f"seed {args.seed}; {describe_machine()}; {len(planned)} runs", flush=True)
    found: dict[str, list[Outcome]] = {"matrix": [], "recoveries": []}
    began = time.monotonic()
    try:
        for number, each in enumerate(planned):
            arguments = {name: value for name, value in asdict(each).items() if name not in ("part", "side", "fault")}
            outcome = run(each.side, each.fault, **arguments)
            found[each.part].append(outcome)
            write_json(args.json, seed=args.seed, **{part: list(map(asdict, each)) for part, each in found.items()})
            who = f"{each.part}, {each.side}, {each.transport}, {each.fault}"
            times = ", ".join(_seconds(s) for s in (outcome.noticed_s, outcome.named_s, outcome.ended_s))
            print(f"{number + 1} of {len(planned)}, {time.monotonic() - began:.0f} s: {who}: {times}", flush=True)
            if each.side != "ddp" and not is_well(outcome):
                print(f"  not as it should be: {outcome}", flush=True)
    finally:
        print(f"\n{report(found)}")


if __name__ == "__main__":
    main()
