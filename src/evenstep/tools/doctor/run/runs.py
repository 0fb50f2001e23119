"""Runs a script under observation: starts the ranks, follows their events, and ends the run if it would hang."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from evenstep.ground.environment import under_watch
from evenstep.ground.host.processes import is_running
from evenstep.ground.host.temporary import private_directory
from evenstep.launcher.options.resources import look_at_host
from evenstep.tools.doctor.run.events import Event, EventFile, Evidence, Hang, Plan
from evenstep.tools.doctor.run.hangs import find_hang, idle_place
from evenstep.tools.observing.launch import Observed, launched

_POLL_S = 0.2
_LONGEST_S = 300.0  # a run that takes longer is ended
_CLOSED_S = 5.0
_HURRIED_S = 15.0  # the time that the script has to end after enough steps
_MOST_RANKS = 8
_SAID_EVERY_S = 20.0  # between lines of progress while no step is made


def watch(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: int = 2,
    num_steps: int = 12,
    say: Callable[[str], None] = lambda line: None,
) -> Evidence:
    """Run a script on some ranks and return their events.

    Args:
        script: The user's script. It runs unchanged; files that it saves go to a private directory.
        arguments: The command-line arguments of the script.
        ranks: The number of ranks.
        num_steps: The number of optimizer steps to watch; then the script is hurried to its end.
        say: Called with each line of progress.
    """
    evidence = _run(script, arguments, ranks, num_steps, say)
    wanted = next((int(each["num_ranks"]) for each in evidence.all("spawns")), ranks)
    if wanted != ranks and 2 <= wanted <= _MOST_RANKS:
        say(f"{script} starts {wanted} ranks of its own: run again on as many")
        evidence = _run(script, arguments, wanted, num_steps, say)
    return evidence


def _run(
    script: str,
    arguments: Sequence[str],
    ranks: int,
    num_steps: int,
    say: Callable[[str], None],
) -> Evidence:
    with private_directory("doctor") as root:
        plan = Plan(str(root), num_steps, ranks)
        plan.write(root / "plan.json")
        say(f"{script} on {ranks} ranks, {num_steps} steps under watch")
        env = under_watch(root, on_cpu=look_at_host().num_gpus == 0)
        observed = Observed("evenstep.tools.doctor.run.probe", script, arguments, ranks)
        with launched(observed, root, env, [str(root / "plan.json")]) as run:
            files = [EventFile(plan.file_of(rank)) for rank in range(ranks)]
            evidence = _follow(run.process, files, say)
        return replace(evidence, said=run.said())


def _follow(process: subprocess.Popen[bytes], files: Sequence[EventFile], say: Callable[[str], None]) -> Evidence:
    """Follow the events until the run ends or hangs. While no step is made, say where the script is."""
    began_s = said_s = time.monotonic()
    hang: Hang | None = None
    is_late = False
    ranks: list[Sequence[Event]] = [[] for _ in files]
    while process.poll() is None:
        now_s = time.monotonic()
        ranks = [_with_end(file.read(), now_s) for file in files]
        hang = find_hang(ranks, now_s)
        is_late = now_s - began_s > _LONGEST_S
        if hang is not None or is_late or _is_hurried_enough(ranks, now_s) or _is_closed(ranks, now_s):
            break
        if now_s - said_s > _SAID_EVERY_S and not Evidence(ranks).num_steps:
            said_s = now_s
            file, line = idle_place(ranks) or ("", 0)
            where = f" (rank 0 is at {os.path.relpath(file)}:{line})" if file else ""
            say(
                f"no step of a torch optimizer after {now_s - began_s:.0f} s{where}: doctor waits for the first one or "
                f"for the end of the script, up to {_LONGEST_S:.0f} s"
            )
        time.sleep(_POLL_S)
    status = process.poll()
    if status is None:
        process.kill()  # its ranks die with it; what they write while they die is no evidence
    else:
        ranks = [_with_end(file.read(), time.monotonic()) for file in files]
    return Evidence([list(events) for events in ranks], hang, is_late, status or 0)


def _is_hurried_enough(ranks: Sequence[Sequence[Event]], now_s: float) -> bool:
    over = [next((each.time_s for each in events if each.kind == "over"), None) for events in ranks]
    return all(each is not None and now_s - each > _HURRIED_S for each in over)


def _is_closed(ranks: Sequence[Sequence[Event]], now_s: float) -> bool:
    """Whether all ranks destroyed their group a while ago: some versions of torch then wait for their own threads."""
    closed = [
        events[-1].kind in ("destroy", "end", "idle") and any(each.kind == "destroy" for each in events)
        for events in ranks
        if events
    ]
    last_s = max((each.time_s for events in ranks for each in events if each.kind != "idle"), default=now_s)
    return len(closed) == len(ranks) and all(closed) and now_s - last_s > _CLOSED_S


def _with_end(events: Sequence[Event], now_s: float) -> Sequence[Event]:
    """The events of a rank, with an "end" added if its process is gone without one."""
    start = next((each for each in events if each.kind == "start"), None)
    if start is None or events[-1].kind == "end" or is_running(start["pid"]):
        return events
    return [*events, Event("end", now_s, facts={"status": "gone"})]
