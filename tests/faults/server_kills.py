"""Kills random workers and servers of a training with parameter servers, and counts how often each sample was applied.

    python -m tests.faults.server_kills --kills 50

Every sample's gradient adds exactly 1 to an entry of a table on each of two servers, so the parameters themselves say
how often each was applied there. A sample that two servers count differently was applied in part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

from evenstep.ground.health.heartbeat import Page
from evenstep.ground.host.processes import is_running
from tests.commands import Command

SCRIPT = """
import random
import time
from pathlib import Path

import torch
import evenstep

SAMPLES, EPOCHS, MODE, BATCHES_S = {samples}, {epochs}, {mode!r}, {batches_s}


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.other = torch.nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))


options = {options}
with evenstep.parameter_server(
    Counts,
    lambda p: torch.optim.SGD(p, lr=1.0),
    mode=MODE,
    checkpoint="counts",
    every_steps={every},
    timeout_s=60,
    **options,
) as ps:
    loader = evenstep.DataLoader(list(range(SAMPLES)), global_batch_size=4, shuffle=True, queue=ps.queue())
    # Who is killed or stopped after the first checkpoint has taken part.
    Path(f"worker-{{ps.worker}}-has-begun").touch()
    while len(list(Path.cwd().glob("worker-*-has-begun"))) < ps.num_workers:
        time.sleep(0.01)
    for epoch in loader.epochs(EPOCHS):
        for batch in loader:
            time.sleep(random.uniform(0, 2 * BATCHES_S))
            ps.backward(-(ps.model.one[batch].sum() + ps.model.other[batch].sum()))
            ps.step()
    stale = ps.staleness()
one, other = ps.model.one.detach(), ps.model.other.detach()
is_equal = torch.equal(one, other)
print(f"worker {{ps.worker}}: counts {{sorted(set(one.tolist()))}}, equal on both servers: {{is_equal}}")
"""


def write_script(directory: Path, *, samples: int, epochs: int, batches_s: float, every: int, mode: str) -> None:
    """The training, as `train.py`."""
    options = {"bounded": "dict(max_staleness=4)"}.get(mode, "{}")
    text = SCRIPT.format(samples=samples, epochs=epochs, mode=mode, batches_s=batches_s, every=every, options=options)
    (directory / "train.py").write_text(text)


def run_with_kills(
    directory: Path, *, kills: int, seed: int, pause_s: tuple[float, float], workers: int = 3
) -> tuple[Command, list[int]]:
    """Run the script, with random ranks killed while it runs; (the command, who was killed).

    A kill comes after a checkpoint that is newer than the kill before: a run whose restarts come to none ends.
    """
    draw = random.Random(seed)
    command = Command(
        directory,
        f"run --servers 2 --nproc-per-node {workers} --device cpu --all-ranks --max-restarts {kills} train.py".split(),
    )
    killed: list[int] = []
    saved: set[str] = set()

    def has_saved() -> bool:
        return command.process.poll() is not None or bool(
            {each.parent.name for each in directory.glob("counts/step-*/manifest.json")} - saved
        )

    while len(killed) < kills and command.process.poll() is None:
        command.wait_until(has_saved)
        time.sleep(draw.uniform(*pause_s))
        rank = draw.randrange(workers + 2)
        pid = processes_of(command).get(rank)
        if pid is not None and is_running(pid):
            os.kill(pid, signal.SIGKILL)
            killed.append(rank)
            saved = {each.parent.name for each in directory.glob("counts/step-*/manifest.json")}
    return command, killed


def processes_of(command: Command) -> dict[int, int]:
    """The ranks' processes, as the launcher's heartbeat pages have them."""
    pages = (Page.at(str(path)) for path in Path(f"/proc/{command.process.pid}/fd").glob("*"))
    seen = (page.read() for page in pages if page is not None)
    return {each.rank: each.pid for each in seen if each is not None}


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--mode", default="async")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    sys.stdout.write(f"seed {seed}\n")
    with tempfile.TemporaryDirectory(prefix="evenstep-kills-") as name:
        directory = Path(name)
        epochs = max(4, args.kills * 3)
        write_script(directory, samples=200, epochs=epochs, batches_s=0.02, every=25, mode=args.mode)
        command, killed = run_with_kills(directory, kills=args.kills, seed=seed, pause_s=(0.5, 3.0))
        status = command.process.wait(900)
        lines = re.findall(r"worker \d: counts .*", command.stdout)
        is_exact = bool(lines) and all(
            f"counts [{float(epochs)}], equal on both servers: True" in each for each in lines
        )
        sys.stdout.write(command.stderr if status or not is_exact else "")
        sys.stdout.write(f"{len(killed)} kills (ranks {killed}), status {status}; {lines}; exact: {is_exact}\n")
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"kills": len(killed), "status": status, "is_exact": is_exact}))
        return 0 if status == 0 and is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
