"""What a lost rank costs: from its death to the next whole step, with a restart from the newest checkpoint.

    python benchmarks/recovery.py --json build/recovery.json
    python benchmarks/recovery.py --torchft /tmp/torchft/bin/python --json build/recovery.json   # torchft beside it

A multilayer perceptron with AdamW on two ranks, of 5 and of 500 MB of parameters, under `--max-restarts 1`, with a
checkpoint every five steps ("restart"), and with a copy on the local disk every two steps besides ("restart, local").
Rank 1 kills itself in the backward pass of a step, three steps after a checkpoint. Of each run: seconds from the death
to the next step that is new, how many steps were repeated until then, and where the time went:

    noticed    the other rank's exchange ends with an error; it may be stopped before that
    started    the ranks run the script again: the launcher has seen all of them end, and has forked new ones
    joined     they have met
    resumed    model and optimizer are built, and have their state
    stepped    the first step that is new is finished

With `--torchft` the same training runs as two replica groups of one rank each under torchft's `Manager`, over Gloo, and
is killed at the same place: `recovery_torchft.py`. "alone" goes on with the survivor. "replaced" starts the killed rank
again at once, with a new python. It needs an environment of its own, as torchft brings packages that `.venv` lacks:

    python3.11 -m venv /tmp/torchft
    /tmp/torchft/bin/pip install torch==2.13.0 && /tmp/torchft/bin/pip install torchft-nightly==2026.10.26

torchft does something else in kind. Its survivor isn't ended, and goes on without the lost rank until the replacement
has come: "lost" ends with the survivor's next step, "whole" with the first step that the replacement takes part in. The
batch of the failed step is "dropped", and the steps between are made without the lost rank's half of their batches:
these samples are "missing". Ours hands out the same global batch again, so that the run ends with the parameters of an
undisturbed one. torchft's parts, of "replaced" those of the replacement, which builds its model before it joins:

    noticed    the survivor's backward pass is over, with an error; or the lighthouse had noticed before it began
    started    the replacement has its imports
    joined     the lighthouse has decided who takes part, and they are connected
    resumed    model and optimizer have the state that the survivor has sent over HTTP, torchft's default
    stepped    the step is finished
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from measuring import describe_machine, markdown, parser_of, write_json

OF_TORCHFT = ("torchft, alone", "torchft, replaced")
DIES_AT, ENDS_AT = 8, 11
SHARE_OF_BATCH = 8  # samples of a rank in a step
LOCAL = 'local="local", local_every_steps=2'
TRAINS = """
import os, sys, time
import evenstep, torch
from torch import nn

width, depth = int(sys.argv[1]), int(sys.argv[2])
marks = [("started", time.monotonic())]
is_first = not os.path.exists("died")


def mark(name):
    marks.append((name, time.monotonic()))


def write():
    if os.environ["RANK"] == "0":
        with open("marks", "a") as file:
            file.writelines(f"{name} {at!r}\\n" for name, at in marks)


def train(world):
    mark("joined")
    net = nn.Sequential(nn.Linear(64, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 1))
    model = evenstep.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = evenstep.DataLoader(torch.randn(4096, 64), global_batch_size=16, shuffle=True)
    checkpoint = evenstep.Checkpointer(
        "saved", every_steps=5, every_minutes=None, model=model, optimizer=optimizer, loader=loader, LOCAL
    )
    checkpoint.resume()
    mark("resumed")
    if world.is_main:
        size = sum(p.nbytes for p in net.parameters())
        print(f"bytes {size}", flush=True)

    def die(_):
        if is_first and world.rank == 1 and checkpoint.num_steps == DIES_AT:
            with open("died", "w") as file:
                file.write(repr(time.monotonic()))
            os.kill(os.getpid(), 9)

    for epoch in loader.epochs(100):
        for x in loader:
            y = model(x)
            y.register_hook(die)
            model.backward(y.square().mean(), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            if checkpoint.num_steps == DIES_AT + 1:
                mark("stepped")
            if world.is_main:
                print(f"step {checkpoint.num_steps}", flush=True)
            if checkpoint.num_steps == ENDS_AT:
                break
        if checkpoint.num_steps == ENDS_AT:
            break


try:
    with evenstep.init(seed=1, quiet=True) as world:
        try:
            train(world)
        except BaseException:
            mark("noticed")
            raise
finally:
    write()
"""
PARTS = ("noticed", "started", "joined", "resumed", "stepped")


def parts_of(died_s: float, reached: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each part; of one that wasn't reached none. Pure."""
    times = [died_s]
    for name in PARTS:
        times.append(max(times[-1], reached.get(name, times[-1])))
    return {name: end - begin for name, begin, end in zip(PARTS, times, times[1:], strict=False)}


def run(width: int, depth: int, local: str = "") -> dict[str, float]:
    """One run of ours; `local` are arguments of its `Checkpointer`."""
    with tempfile.TemporaryDirectory(prefix="evenstep-bench-recovery-") as name:
        directory = Path(name)
        (directory / "tmp").mkdir()
        text = TRAINS.replace("DIES_AT", str(DIES_AT)).replace("ENDS_AT", str(ENDS_AT)).replace("LOCAL", local)
        (directory / "train.py").write_text(text)
        flags = ["--nproc-per-node", "2", "--device", "cpu", "--threads-per-rank", "1", "--max-restarts", "1"]
        command = [sys.executable, "-m", "evenstep", "run", *flags, "train.py", str(width), str(depth)]
        env = {**os.environ, "TMPDIR": str(directory / "tmp")}
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        died_s = float((directory / "died").read_text())
        marks = [(name, float(at)) for name, at in map(str.split, (directory / "marks").read_text().splitlines())]
        reached = {name: at for name, at in marks if at > died_s}  # the last of each: of the ranks that went on
        numbers = re.findall(r"step (\d+)", done.stdout)
        return {
            "bytes": float(re.findall(r"bytes (\d+)", done.stdout)[0]),
            "lost_s": reached["stepped"] - died_s,
            "whole_s": reached["stepped"] - died_s,
            **parts_of(died_s, reached),
            "repeated": len(numbers) - len(set(numbers)) + 1,
            "dropped": 0,
            "missing": 0,
        }


class TorchftRun:
    """The processes of one run of torchft, in a directory of their own.

    Args:
        python: Of the environment that has torchft.
        directory: Where they run; empty.
        shape: Width and depth of the model.
    """

    def __init__(self, python: Path, directory: Path, shape: tuple[int, int]) -> None:
        self._command = [str(python), str(Path(__file__).with_name("recovery_torchft.py"))]
        self._directory, self._shape = directory, shape
        self._env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        self._started: list[subprocess.Popen[str]] = []

    def start_lighthouse(self) -> None:
        """Start the lighthouse at which the ranks that follow meet."""
        lighthouse = self._start("lighthouse", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert lighthouse.stdout is not None
        self._env["TORCHFT_LIGHTHOUSE"] = lighthouse.stdout.readline().strip()

    def start_rank(self, rank: int) -> subprocess.Popen[str]:
        """Start a replica group of one rank."""
        return self._start(str(rank), *map(str, self._shape), stdout=subprocess.DEVNULL)

    def died_s(self) -> float:
        """When rank 1 was killed."""
        return float((self._directory / "died").read_text())

    def marks(self, rank: int, *, after_s: float = 0.0) -> list[tuple[str, float, int]]:
        """What the ranks of this number have reached so far, when, and with how many; only whole lines."""
        lines = (self._directory / f"marks-{rank}").read_text().rpartition("\n")[0].splitlines()
        found = ((name, float(at), int(number)) for name, at, number in map(str.split, lines))
        return [each for each in found if each[1] > after_s]

    def wait_for_step(self, rank: int, num_ranks: int) -> None:
        """Return when a rank has made a step after the death in which so many ranks took part."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if any(n == "stepped" and number == num_ranks for n, _, number in self.marks(rank, after_s=self.died_s())):
                return
            time.sleep(0.01)
        raise SystemExit(f"torchft made no step with {num_ranks} ranks: {self.told()}")

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def told(self) -> str:
        """The end of what the processes have written as errors."""
        return (self._directory / "stderr").read_text()[-4000:]

    def _start(self, *arguments: str, **streams: int) -> subprocess.Popen[str]:
        with (self._directory / "stderr").open("a") as stderr:
            started = subprocess.Popen(
                [*self._command, *arguments], cwd=self._directory, env=self._env, stderr=stderr, text=True, **streams
            )
        self._started.append(started)
        return started


def run_torchft(python: Path, way: str, width: int, depth: int) -> dict[str, float]:
    """One run of torchft, with the figures of `run`."""
    with tempfile.TemporaryDirectory(prefix="evenstep-bench-torchft-") as name, contextlib.ExitStack() as stack:
        job = TorchftRun(python, Path(name), (width, depth))
        stack.callback(job.end)
        job.start_lighthouse()
        job.start_rank(0)
        assert job.start_rank(1).wait(240) == -signal.SIGKILL, job.told()
        if way == "torchft, replaced":
            job.start_rank(1)
            job.wait_for_step(1, 2)
        else:
            job.wait_for_step(0, 1)
        died_s, of_survivor, of_replacement = job.died_s(), job.marks(0), job.marks(1, after_s=job.died_s())
    # The survivor may end the last step of both after the other's death.
    common = [index for index, (mark, _, _) in enumerate(of_survivor) if mark == "stepped"][:DIES_AT]
    assert all(of_survivor[index][2] == 2 for index in common), f"the ranks haven't trained together: {of_survivor}"
    of_survivor = of_survivor[common[-1] + 1 :]
    first = {mark: at for mark, at, _ in reversed(of_survivor)}
    if of_replacement:
        noticed = {"noticed": first["noticed"]} if "noticed" in first else {}
        reached = noticed | {mark: at for mark, at, _ in reversed(of_replacement)}
        whole_s = reached["stepped"] - died_s
    else:
        reached, whole_s = first, 0.0
    until = max(reached["stepped"], first["stepped"])
    num_void = sum(mark == "dropped" for mark, at, _ in of_survivor if at <= until)
    num_alone = sum(mark == "stepped" and number == 1 for mark, at, number in of_survivor if at <= until)
    return {
        "lost_s": first["stepped"] - died_s,
        "whole_s": whole_s,
        **parts_of(died_s, reached),
        "repeated": 0,
        "dropped": SHARE_OF_BATCH * 2 * num_void,
        "missing": SHARE_OF_BATCH * num_alone,
    }


def versions(python: Path) -> str:
    """Of torchft and torch in an environment."""
    code = "from importlib.metadata import version as v; print('torchft', v('torchft-nightly'), 'torch', v('torch'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Print a table and write it as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--repeats-large", type=int, default=2, help="of the 500 MB (default: %(default)s)")
    parser.add_argument("--sizes", default="5,500", help="MB of parameters")
    parser.add_argument(
        "--torchft", type=Path, metavar="PYTHON", help="of an environment that has it, to measure it, too"
    )
    args = parser.parse_args()
    shapes = {"5": (512, 4), "500": (4096, 7)}
    repeats = {"5": args.repeats, "500": args.repeats_large}
    if args.torchft is None:
        print("without torchft: --torchft PYTHON names the python of an environment that has it")
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(args.repeats):
        for size in args.sizes.split(","):
            if number >= repeats[size]:
                continue
            found.setdefault(f"{size} MB, restart", []).append(run(*shapes[size]))
            found.setdefault(f"{size} MB, restart, local", []).append(run(*shapes[size], LOCAL))
            for way in OF_TORCHFT if args.torchft is not None else ():
                found.setdefault(f"{size} MB, {way}", []).append(run_torchft(args.torchft, way, *shapes[size]))
    torchft = "" if args.torchft is None else versions(args.torchft)
    columns = f"way | lost, s | range | whole, s | repeated | dropped | missing | {' | '.join(PARTS)}"
    print(
        f"{describe_machine()} {torchft}\n\n{markdown(columns, [[way, *cells(runs)] for way, runs in found.items()])}"
    )
    write_json(args.json, torchft=torchft, runs=found)


def cells(runs: list[dict[str, float]]) -> list[str]:
    """Medians of the runs of one way, with the range of what is lost. Pure."""
    middle = {name: f"{statistics.median(each[name] for each in runs):.2f}" for name in runs[0]}
    lost = [each["lost_s"] for each in runs]
    counts = [f"{max(each[name] for each in runs):.0f}" for name in ("repeated", "dropped", "missing")]
    spread = f"{min(lost):.2f} to {max(lost):.2f}"
    return [middle["lost_s"], spread, middle["whole_s"], *counts, *(middle[part] for part in PARTS)]


if __name__ == "__main__":
    main()
