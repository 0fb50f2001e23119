"""Faults at every phase, rank and transport: what is noticed when, who is blamed, what is lost, what is left behind.

    python benchmarks/faults.py                                 # the matrix, and torch's DDP under torchrun beside it
    python benchmarks/faults.py --small --no-ddp                # one victim, one transport: some minutes
    python benchmarks/faults.py --cascades 200 --json build/faults.json

Of every run is recorded, in seconds after the fault: when a surviving rank noticed, when the screen named somebody,
when the launcher had ended; who was blamed; the exit status; what is left of processes, of files in /dev/shm and in
the temporary directory. Runs with restarts also tell how soon the next step was taken, how many steps were made twice,
and whether any sample was lost or used twice in the history that counts.

A cascade is four ranks, a fault of chance at a rank, step and phase of chance; the others fall over each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from measuring import describe_machine

SCRIPT = str(Path(__file__).with_name("faulty_training.py"))
PHASES = ("forward", "backward", "optimizer")
KINDS = ("kill", "raise", "exit", "segfault", "stop", "hold", "shape", "close")
# What the run must end with; where more than one is right, all of them.
STATUS = {"kill": {137}, "raise": {1}, "exit": {72}, "segfault": {139}, "stop": {71}, "hold": {71}, "shape": {72}}
STATUS["close"] = {134, 76}
_BLAMED = (
    re.compile(r"evenstep: (?:rank (\d+) \(pid \d+\) (?:failed|was killed|exited|had|is stopped|is in|is between))"),
    re.compile(r"rank\s*: (\d+) \(local_rank"),  # torchrun's summary
)
_DISAGREE = re.compile(r"the ranks disagree")
_DEADLINE_S = 120.0


@dataclass
class Outcome:
    """One run. Times in seconds after the fault; NaN: never."""

    side: str
    fault: str
    transport: str
    num_ranks: int
    victim: int
    noticed_s: float = math.nan
    named_s: float = math.nan
    ended_s: float = math.nan
    blamed: int | None = None
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
        """Whether the victim was blamed. Where ranks disagree, nobody is: both calls are shown."""
        return self.blamed == self.victim or (self.kind == "shape" and _DISAGREE.search(self.last_line) is not None)


class Call:
    """A launcher, watched: the time of every line on its screen, and every process that it has started."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._directory = directory
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.lines: list[tuple[float, str]] = []
        self._shm = set(os.listdir("/dev/shm"))
        self._files = set(os.listdir(directory))
        variables = os.environ | {"TMPDIR": str(self.temporary), "BENCH_MARK": self.mark, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=directory, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self) -> tuple[int, float]:
        """(Exit status, when), killed if it takes too long."""
        try:
            status = self.process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            status = -999
        ended = time.monotonic()
        if status == -999:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join(5)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()
        return status, ended

    def processes(self) -> list[int]:
        """All alive that this call has started, however far down."""
        return list(_marked(self.mark))

    def left(self) -> list[str]:
        """What is left behind a second after the end; logs of a failed run are kept on purpose.

        Processes, with what they listen on; segments in /dev/shm; sockets and files in the temporary directory and
        where the run was started. A socket without a name is there only as long as a process holds it.
        """
        deadline = time.monotonic() + 1.0
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = [f"process {pid}{_listening(pid)}" for pid in found]
        # Semaphores of multiprocessing are other programs': there are no workers here.
        new = set(os.listdir("/dev/shm")) - self._shm
        left += [f"/dev/shm/{name}" for name in new if not name.startswith("sem.mp-")]
        kept = ("evenstep-logs-", "torchelastic_", "torchinductor")
        mine = [path for path in self.temporary.iterdir() if not path.name.startswith(kept)]
        mine += [path for path in self._directory.iterdir() if path.name not in self._files]
        return left + [f"{'socket' if path.is_socket() else 'file'} {path.name}" for path in mine]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))


def _listening(pid: int) -> str:
    """ " on port ..., ...", if a process listens on any."""
    held = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                held.add(os.readlink(descriptor))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return f" on port {', '.join(map(str, sorted(ports)))}" if ports else ""


def _marked(mark: str) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = mark.encode() in (entry / "environ").read_bytes()
            if is_ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield int(entry.name)
        except OSError:
            continue


def run(
    side: str, fault: str, *, transport: str = "shared memory", num_ranks: int = 2, victim: int = 1, restarts: int = 0
) -> Outcome:
    """One fault, on one side."""
    outcome = Outcome(side, fault, transport, num_ranks, victim)
    directory = Path(tempfile.mkdtemp(prefix="bench-faults-"))
    try:
        diary = directory / "diary"
        diary.mkdir()
        target = [SCRIPT, "--diary", str(diary), "--fault", fault]
        if side == "ddp":
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
            target += ["--engine", "ddp"]
        else:
            flags = ["--device", "cpu", "--stopped-grace", "0", "--budget", "step=1", "--max-restarts", str(restarts)]
            command = ["-m", "evenstep", "run", "--nproc-per-node", str(num_ranks), *flags]
            target += ["--transport", transport, "--save-every", "4" if restarts else "0"]
        call = Call([sys.executable, *command, *target], directory)
        status, ended = call.wait()
        outcome.status = None if status == -999 else 128 - status if status < 0 else status
        struck = _time(diary / "fault")
        outcome.ended_s = ended - struck if outcome.status is not None else math.nan
        noticed = [_time(path) for path in diary.glob("noticed-*") if path.name != f"noticed-{victim}"]
        outcome.noticed_s = min(noticed, default=math.nan) - struck
        blames = [(at, int(found[1])) for at, line in call.lines if (found := _blame(line))]
        if blames:
            outcome.named_s, outcome.blamed = blames[-1][0] - struck, blames[-1][1]
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


def _blame(line: str) -> re.Match[str] | None:
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
    rows = ["| side | fault | runs | noticed by a peer | named | ended | blame right | status | left behind |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for side, kind in dict.fromkeys((each.side, each.kind) for each in outcomes):
        group = [each for each in outcomes if (each.side, each.kind) == (side, kind)]
        times = [
            " / ".join(_seconds(percentile((getattr(o, name) for o in group), share)) for share in (0.5, 0.99, 1.0))
            for name in ("noticed_s", "named_s", "ended_s")
        ]
        right = f"{sum(each.is_right for each in group)} of {len(group)}"
        statuses = ", ".join(f"{status} ({n})" for status, n in Counter(each.status for each in group).items())
        left = sum(len(each.left) for each in group)
        rows.append(f"| {side} | {kind} | {len(group)} | {' | '.join(times)} | {right} | {statuses} | {left} |")
    return "\n".join(rows)


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def fault_text(kind: str, rank: int, step: int, phase: str) -> str:
    """A fault as `evenstep.testing.faults` reads it. Pure."""
    more = ",seconds=100" if kind == "hold" else ""
    return f"{kind}:rank={rank},step={step},phase={phase}{more}"


def main() -> None:
    """Run the matrix, the recoveries and the cascades; print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one victim and one transport")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--phases", nargs="*", default=list(PHASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cascades", type=int, default=0)
    parser.add_argument("--recoveries", type=int, default=3)
    parser.add_argument("--no-ddp", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}; {describe_machine()}", flush=True)
    draw = random.Random(args.seed)
    outcomes: list[Outcome] = []
    recoveries: list[Outcome] = []

    def note(outcome: Outcome, into: list[Outcome]) -> None:
        into.append(outcome)
        is_well = outcome.is_right and not outcome.left and outcome.status in STATUS.get(outcome.kind, {outcome.status})
        if not is_well and outcome.side != "ddp" and into is not recoveries:
            print(f"  not as it should be: {outcome}", flush=True)

    for _ in range(args.repeats):
        for kind in args.kinds:
            for phase in args.phases:
                for victim in (1,) if args.small else (0, 1):
                    fault = fault_text(kind, victim, draw.randrange(2, 30), phase)
                    for transport in ("shared memory",) if args.small else ("shared memory", "gloo"):
                        if kind != "shape" or transport == "shared memory":  # over Gloo it is what Gloo makes of it
                            note(run("evenstep", fault, transport=transport, victim=victim), outcomes)
                    if not args.no_ddp and phase == "backward" and kind != "shape":
                        note(run("ddp", fault, transport="gloo", victim=victim), outcomes)
    print(table(outcomes), flush=True)
    for _ in range(args.recoveries):
        kind = draw.choice(["kill", "raise", "segfault", "exit"])
        victim = draw.randrange(2)
        fault = fault_text(kind, victim, draw.randrange(5, 30), draw.choice(PHASES))
        note(run("evenstep", fault, victim=victim, restarts=1), recoveries)
    if recoveries:
        times = [each.recovered_s for each in recoveries]
        print(
            f"\n{len(recoveries)} recoveries: next step after {_seconds(percentile(times, 0.5))} s (p50), "
            f"{_seconds(percentile(times, 1.0))} s (max); steps made twice: {sum(e.steps_twice for e in recoveries)}; "
            f"samples lost or repeated: {sum(e.samples_wrong for e in recoveries)}; "
            f"status {dict(Counter(e.status for e in recoveries))}; left behind: {sum(len(e.left) for e in recoveries)}"
        )
    cascades: list[Outcome] = []
    for _ in range(args.cascades):
        kind, victim = draw.choice(["kill", "raise", "exit", "segfault"]), draw.randrange(4)
        fault = fault_text(kind, victim, draw.randrange(2, 30), draw.choice(PHASES))
        note(run("evenstep", fault, num_ranks=4, victim=victim), cascades)
    if cascades:
        right = sum(each.is_right for each in cascades)
        confident = sum(each.blamed is not None and each.blamed != each.victim for each in cascades)
        print(f"\n{len(cascades)} cascades of 4 ranks: blame right in {right}, wrong in {confident}\n{table(cascades)}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": describe_machine(), "seed": args.seed}
        found |= {"matrix": list(map(asdict, outcomes)), "recoveries": list(map(asdict, recoveries))}
        args.json.write_text(json.dumps(found | {"cascades": list(map(asdict, cascades))}, indent=1))


if __name__ == "__main__":
    main()
