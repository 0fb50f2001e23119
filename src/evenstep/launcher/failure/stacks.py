"""A rank's activity, read from the python stacks that faulthandler has written. Pure, except `StackRequest`.

A rank waits for other ranks if its innermost python frame is in torch's distributed modules, or in a backward pass that
uses no processor, or if its line calls `wait` on a collective's handle. A rank with a GPU also waits if its line reads
a number from the GPU: the GPU first completes the collectives before it.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.ground.health.users_code import PACKAGE, TORCH, is_users
from evenstep.ground.host.processes import children, handles_signal
from evenstep.launcher.spawn.script_runner import STACK_SIGNAL

_LONGEST_S = 0.5
_MOST_WORKERS = 8
_TRIES = 6  # on a busy node a worker may get no processor for so long that it doesn't answer
_POLL_S = 0.02

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_THREAD = re.compile(r"^(?:Current thread 0x[0-9a-f]+|Thread 0x[0-9a-f]+|Stack \(most recent).*:$")

_DISTRIBUTED = ("distributed/", "nn/parallel/distributed.py")
_NOT_WAITING = ("distributed/checkpoint/", "distributed/elastic/")
_ENGINE = "_engine_run_backward"  # python's last frame in a backward pass
_PASSED_OVER = ("_ops.py", "_compile.py")  # frames to skip: python calls operators through these files
_WRAPPERS = re.compile(r"wrapper|_wrapped_call_impl|_call_impl|inner|_fn|decorate_context|__call__|_.*")
_WAITS = re.compile(r"\.wait\(|wait_tensor")
_READS_DEVICE = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(")
LOADING = "loading data"
# A rank's activity in one of torch's files, by a part of the file's name. The innermost frame decides.
_PHASES = (
    ("utils/data/", LOADING, 1.0),
    ("_dynamo/", "compiling", 6.0),
    ("_inductor/", "compiling", 6.0),
    ("distributed/checkpoint/", "saving or loading", 6.0),
    ("serialization.py", "saving or loading", 6.0),
    ("optim/", "in the optimizer's step", 1.0),
    ("autograd/", "in backward", 1.0),
    ("distributed/rendezvous.py", "joining the others", 1.0),
    ("nn/modules/module.py", "in forward", 1.0),
)


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    def in_torch(self) -> str:
        """The frame's file, relative to torch's folder; "" if it is elsewhere."""
        return self.file.removeprefix(TORCH).replace(os.sep, "/") if self.file.startswith(TORCH) else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Place:
    """The position of a rank in its code.

    Attributes:
        call: The call in which the rank waits, such as "barrier"; "": it doesn't wait.
        is_for_device: Whether the rank waits for its GPU, which waits for other ranks.
        phase: The rank's activity, in words; "": the stack doesn't show it.
        patience: The factor by which this activity may take longer than usual.
        site: The innermost line of the user's code, with its text; "": there is none.
        stack: The frames from the script on, the innermost last.
    """

    call: str = ""
    is_for_device: bool = False
    phase: str = ""
    patience: float = 1.0
    site: str = ""
    stack: str = ""


def parse_stacks(text: str) -> list[list[Frame]]:
    """The threads in one dump of faulthandler, the main thread last. Each is a list of frames, the innermost first."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            number = int(found["line"]) if found["line"].isdecimal() else 0
            threads[-1].append(Frame(found["file"], number, found["function"]))
    return [frames for frames in threads if frames]


class StackRequest:
    """Stacks that were requested by a signal.

    Args:
        processes: (pid, the file to which it writes), by rank. Processes that don't handle the signal are left out.
    """

    def __init__(self, processes: Mapping[int, tuple[int, Path]]) -> None:
        self._sent = time.monotonic()
        self._begins: dict[int, tuple[Path, int]] = {}
        self._sizes: dict[int, int] = {}
        for rank, (pid, path) in processes.items():
            # A process without a handler would die of the signal: a script may have become another program.
            if handles_signal(pid, STACK_SIGNAL):
                self._begins[rank] = (path, path.stat().st_size)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)

    def is_complete(self) -> bool:
        """Whether all stacks have been written (no file has grown since the last call), or too much time has passed."""
        sizes = {rank: path.stat().st_size for rank, (path, _) in self._begins.items()}
        is_still = sizes == self._sizes and all(sizes[rank] > begin for rank, (_, begin) in self._begins.items())
        self._sizes = sizes
        return is_still or time.monotonic() - self._sent > _LONGEST_S

    def await_stacks(self, longest_s: float) -> dict[int, str]:
        """Return `stacks` as soon as they are complete, at the latest after the given time."""
        deadline = time.monotonic() + longest_s
        while time.monotonic() < deadline and not self.is_complete():
            time.sleep(_POLL_S)
        return self.stacks()

    def stacks(self) -> dict[int, str]:
        """Each process's text, by rank; "" if it has written nothing."""
        found = {}
        for rank, (path, begin) in self._begins.items():
            with path.open("rb") as file:
                file.seek(begin)
                found[rank] = file.read().decode(errors="replace").strip()
        return found


def place_of(
    threads: Sequence[Sequence[Frame]],
    *,
    is_idle: bool,
    has_gpu: bool = False,
    source: Callable[[str, int], str] = linecache.getline,
) -> Place:
    """Where a rank is, according to its stacks.

    Args:
        threads: The result of `parse_stacks`.
        is_idle: Whether the rank's main thread uses no processor.
        has_gpu: Whether the rank has opened a GPU.
        source: Returns the text of a line of a file.
    """
    if not threads:
        return Place()
    frames = without_machinery(threads[-1])
    if not frames:
        return Place()
    if frames[0].function == _ENGINE:
        # The GPU's part of the backward pass runs in a thread that python hasn't started. A rank with a hanging hook
        # there doesn't wait for other ranks.
        hooks = [
            each for each in threads[:-1] if each[-1].function != "_bootstrap" and any(is_users(f.file) for f in each)
        ]
        if hooks:
            frames = [*hooks[0], *frames]
    users = next((frame for frame in frames if is_users(frame.file)), None)
    text = "" if users is None else source(users.file, users.line).strip()
    phase, patience = _phase(frames)
    call, is_for_device = _call(frames, text if frames[0] is users else "", is_idle=is_idle, has_gpu=has_gpu)
    site = "" if users is None else f"{users}: {text}" if text else str(users)
    return Place(call, is_for_device, phase, patience, site, _shown(frames, source))


def place_in_worker(
    threads: Sequence[Sequence[Frame]], *, source: Callable[[str, int], str] = linecache.getline
) -> Place | None:
    """Where a loader's worker is in the user's code; None if it isn't in the user's code.

    Below its own frames, a forked worker's stack has the frames that its rank had at the fork.
    """
    frames = [*itertools.takewhile(lambda frame: frame.function != "_bootstrap", threads[-1])] if threads else []
    if not any(is_users(frame.file) for frame in frames):
        return None
    return place_of([frames], is_idle=False, source=source)


def without_machinery(frames: Sequence[Frame]) -> list[Frame]:
    """Leave out the frames that started the script: evenstep's launcher, and the frames below it."""
    ends = [number for number, each in enumerate(frames) if each.file.startswith(f"{PACKAGE}launcher{os.sep}")]
    return list(frames[: ends[0]] if ends else frames)


def _call(frames: Sequence[Frame], text: str, *, is_idle: bool, has_gpu: bool) -> tuple[str, bool]:
    """(The call in which a rank waits, whether it waits for its GPU).

    Args:
        text: The line of the innermost frame, if that is the user's code.
    """
    if text:
        if is_idle and _WAITS.search(text):
            return "a collective", False
        found = _READS_DEVICE.search(text) if has_gpu else None
        return (found[1], True) if found else ("", False)
    inner = [frame for frame in frames if frame.in_torch() not in _PASSED_OVER]
    if not inner:
        return "", False
    place = inner[0].in_torch()
    if inner[0].function == _ENGINE:
        return ("backward", False) if is_idle else ("", False)
    if has_gpu and place.startswith("cuda/") and inner[0].function == "synchronize":
        return "synchronize", True
    if not place.startswith(_DISTRIBUTED) or place.startswith(_NOT_WAITING):
        return "", False
    torchs = [*itertools.takewhile(lambda frame: frame.in_torch(), inner)]
    names = [frame.function for frame in torchs]
    if names[-1] == "__init__":
        made = "DistributedDataParallel()" if "nn/parallel/" in torchs[-1].in_torch() else "a constructor"
        return made, False
    name = next((name for name in reversed(names) if not _WRAPPERS.fullmatch(name)), names[-1])
    return name.removeprefix("pre_").removeprefix("post_"), False  # names of FSDP's functions


def _phase(frames: Sequence[Frame]) -> tuple[str, float]:
    for frame in frames:
        place = frame.in_torch()
        for part, words, patience in _PHASES:
            if place.startswith(part):
                return words, patience
        if frame.file.startswith("<frozen importlib"):
            return "importing", 1.0
    return "", 1.0


def _shown(frames: Sequence[Frame], source: Callable[[str, int], str], *, most: int = 16) -> str:
    """Format a stack as python does, without the middle of a very deep one."""
    lines = []
    for number, frame in enumerate(reversed(frames)):
        if most // 2 <= number < len(frames) - most // 2:
            lines += ["  ..."] if number == most // 2 else []
            continue
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        text = source(frame.file, frame.line).strip() if is_users(frame.file) else ""
        lines += [f"    {text}"] if text else []
    return "\n".join(lines)


class WorkerStacks:
    """Reads the stacks of a loader's workers, one after the other, because they all write to their rank's file."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, Path, int]] = deque()  # the last number: remaining tries
        self._asked: tuple[int, int, Path, int] | None = None
        self._request = StackRequest({})

    def ask(self, rank: int, pid: int, path: Path) -> None:
        """Request the stacks of the workers that a rank has forked."""
        self._waiting.extend((rank, child, path, _TRIES) for child in children(pid)[:_MOST_WORKERS])

    @property
    def is_busy(self) -> bool:
        """Whether a worker is writing now."""
        return self._asked is not None

    def poll(self) -> list[str]:
        """Lines about workers that are in the user's code; other workers are idle. Never blocks."""
        lines = []
        if self._asked is not None:
            rank, worker, path, tries = self._asked
            if not self._request.is_complete():
                return []
            self._asked = None
            stacks = self._request.stacks()
            place = place_in_worker(parse_stacks(stacks.get(rank, "")))
            if place is not None:
                lines.append(f"a worker of rank {rank}'s loader (pid {worker}) is here:\n{place.stack}")
            elif stacks.get(rank) == "" and tries > 1:
                self._waiting.append((rank, worker, path, tries - 1))
        if self._waiting:
            self._asked = rank, worker, path, _ = self._waiting.popleft()
            self._request = StackRequest({rank: (worker, path)})
        return lines
