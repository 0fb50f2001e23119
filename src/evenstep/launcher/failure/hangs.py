"""Finds the rank that keeps the others waiting, in any torch program, from outside.

[Note: how a hang is seen]

The heartbeat page of a program that never imports evenstep shows only its optimizer's steps. Nothing in the program is
patched for this, and nothing is added to its step. The launcher checks three things instead:

- the page: how long has it been unchanged, and how long is the rank's median step?
- the kernel: has the rank's main thread used a processor? A rank that waits in a collective of Gloo uses none.
- the stacks: faulthandler writes them when it gets a signal, even while the interpreter lock is held. The signal is
  sent only if a rank has not stepped for too long and hardly uses the processor (or may have a GPU), and then less and
  less often: a signal interrupts a sleep in C code that may not expect it.

A rank *waits* if its stack shows a wait and it has used no processor since. If waiting uses the processor (for a GPU,
in the rendezvous), three checks must find the same stack. A rank that doesn't wait while others do is *missing*. It is
named once, and again when it has arrived. If it arrives by itself, a later wait at the same place is reported only
after twice the time.

Everything here is pure: `stacks.StackRequest` sends the signal, and `ground.host.processes` reads /proc.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from evenstep.console import printable
from evenstep.ground.health.heartbeat import WORDS, Heartbeat, Phase
from evenstep.ground.health.phase_timeouts import PhaseTimeouts, patience
from evenstep.launcher.failure.detection import RankState
from evenstep.launcher.failure.stacks import LOADING, Place, parse_stacks, place_of

DEFAULT_AFTER_S = 10.0
_NUM_STEPS = 10  # a missing rank is named after this many median step times without a step
_STEPS_KEPT = 64
_RUNS_NS = 50_000  # a thread that has used the processor for longer than this has made progress
_QUIET = 0.1  # of a processor's time: a rank that uses more is computing
_MOST_EXCUSED = 8
_FRESH_S = 2.0
_SURE_AFTER = 3  # checks with the same stack
_LOOKS_AT = (0.5, 0.75, 1.0)  # times of checks, relative to the time after which a rank is named; then 2, 4, ...
_SAME_CALL = 6.0  # longer if all wait in the same call: a slow network is no hang
_CONFIRM_NS = 500_000_000  # within this time a rank that raises would have ended
_MOST_STACKS = 3
_MOST_SITES = 6
_MOST_SENT = 64  # ranks of a node that are reported to other nodes
_MOST_TEXT = 3000  # characters of a stack
UNDER_NO_IF = "Collective calls (world.mean, a save) must not be inside an `if` that is true only on some ranks."
_KNOWN_LONG = (Phase.EVALUATING, Phase.SAVING, Phase.COMPILING, Phase.MAIN_FIRST)


@dataclass(frozen=True)
class RankView:
    """The known state of a rank; also sent to the launchers of other nodes.

    Attributes:
        step: Number of steps that it has finished.
        call: The call in which the rank waits; "": it doesn't wait.
        is_idle: Whether the rank used no processor since the last check.
        is_sure: Whether enough checks have confirmed that it waits, or doesn't.
        waited_s: How long the rank has waited.
        allowed_s: After this time the missing ranks are reported.
        phase: The rank's activity, in words.
        patience: The factor by which this activity may take longer than `allowed_s`.
        site: The rank's line in the user's code.
        stack: The rank's stack.
        limit_s: After this time the run is ended because of this rank; None: never.
        where: A description of the rank's node, if it is another node.
    """

    rank: int
    pid: int
    step: int
    call: str = ""
    is_for_device: bool = False
    is_idle: bool = False
    is_sure: bool = False
    is_suspended: bool = False
    has_ended: bool = False
    waited_s: float = 0.0
    allowed_s: float = DEFAULT_AFTER_S
    phase: str = ""
    patience: float = 1.0
    site: str = ""
    stack: str = ""
    limit_s: float | None = None
    where: str = ""

    @property
    def name(self) -> str:
        """The rank, its process and its node."""
        return f"rank {self.rank} (pid {self.pid}{', ' if self.where else ''}{self.where})"


@dataclass(frozen=True)
class HeldUp:
    """Ranks that wait, and the missing ranks for which they wait. If none is missing, they wait for each other."""

    missing: tuple[RankView, ...]
    waiting: tuple[RankView, ...]

    @property
    def waited_s(self) -> float:
        """The longest wait of these ranks."""
        return max(view.waited_s for view in self.waiting)

    @property
    def key(self) -> tuple[frozenset[int], frozenset[str]]:
        """The missing ranks, and the places where the others wait."""
        return frozenset(view.rank for view in self.missing), frozenset(view.site for view in self.waiting)


def find_held_up(
    views: Iterable[RankView], *, num_ranks: int, longer: Mapping[object, float] | None = None
) -> HeldUp | None:
    """The ranks that keep others waiting for longer than allowed; None: there are none. Pure.

    Args:
        views: The states of ranks on all nodes.
        num_ranks: Number of all ranks: they wait for each other only if all are known to wait.
        longer: Longer allowed times in seconds, by `HeldUp.key`, because the same wait has ended by itself before.
    """
    views = sorted(views, key=lambda view: (view.step, view.rank))
    waiting = tuple(view for view in views if view.call and view.is_sure)
    is_idle = any(view.is_idle for view in waiting)
    missing = tuple(view for view in views if not view.call and (view.is_sure or is_idle))
    if not waiting:
        return None
    found = HeldUp(missing, waiting)
    if missing:
        allowed = min(view.allowed_s for view in waiting) * min(view.patience for view in missing)
        is_long = found.waited_s >= max(allowed, (longer or {}).get(found.key, 0.0))
    elif len(waiting) == num_ranks > 1 and not any(view.is_for_device for view in waiting):
        factor = 1.0 if _differ(waiting) else _SAME_CALL
        is_long = all(view.waited_s >= factor * view.allowed_s for view in waiting)
    else:
        is_long = False
    return found if is_long else None


def describe_held_up(found: HeldUp) -> list[str]:
    """The lines that are printed when a rank is named. Pure."""
    since = f"since {found.waited_s:.0f} s"
    lines = []
    if found.missing:
        names = " and ".join(f"{view.name} is {view.phase}" for view in found.missing[:_MOST_STACKS])
        rest = len(found.missing) - _MOST_STACKS
        names += f" and {rest} others are missing, too" if rest > 0 else ""
        limit = max((view.limit_s for view in found.missing if view.limit_s is not None), default=None)
        them = found.missing[0].name.partition(" (")[0] if len(found.missing) == 1 else "they"
        end = f"The run goes on; another line says when {them} {'has' if len(found.missing) == 1 else 'have'} come"
        if any(view.has_ended for view in found.missing):
            end = "They wait until their connections or deadlines end the wait"
        if limit is not None:
            end = f"All ranks are stopped after {limit:g} s"
        if not any(view.step for view in found.waiting):
            end = f"No step has been finished yet, and the first step may take long. {end}"
        lines.append(f"{names}; {_ranks(found.waiting)} {since}. {end}")
        for view in found.missing[:_MOST_STACKS]:
            if view.stack:
                lines.append(f"rank {view.rank} is here:\n{view.stack}")
            elif view.site:
                lines.append(f"rank {view.rank} is here: {view.site}")
    elif _differ(found.waiting):
        lines.append(
            f"all ranks wait for each other {since}, but in different places. All ranks have to call the same "
            f"collectives in the same order, and equally often. {UNDER_NO_IF} The deadline of the calls will end the "
            f"wait"
        )
    else:
        lines.append(
            f"all ranks have waited in the same call {since}: the network between them is slow or cut, or the "
            f"arguments of their calls differ"
        )
    return lines + _sites(found.waiting)


def describe_arrival(found: HeldUp, waited_s: float) -> str:
    """The line that is printed when the ranks that waited go on. Pure."""
    if not found.missing:
        return f"the ranks that waited for each other go on, after {waited_s:.0f} s"
    names = " and ".join(view.name for view in found.missing[:_MOST_STACKS])
    verb = "has" if len(found.missing) == 1 else "have"
    return f"{names} {verb} come, after {waited_s:.0f} s: the ranks that waited go on"


def _waits_still(before: RankView, views: Mapping[int, RankView]) -> bool:
    """Whether a rank still waits at the same place. A rank that waits at another place by now has made progress."""
    now = views[before.rank]
    return bool(now.call) and (now.step, now.site) == (before.step, before.site)


def _differ(waiting: Sequence[RankView]) -> bool:
    return len({(view.site, view.call, view.step) for view in waiting}) > 1


def _ranks(views: Sequence[RankView]) -> str:
    verb = "waits" if len(views) == 1 else "wait"
    return f"{_numbers(view.rank for view in views)} {verb}"


def _numbers(ranks: Iterable[int]) -> str:
    """Numbers of ranks in words: "rank 0", or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(runs) == len(runs[0]) == 1 else f"ranks {text}"


def _sites(waiting: Sequence[RankView]) -> list[str]:
    """The places where ranks wait, a line for each place."""
    by_site: dict[tuple[str, str, int], list[RankView]] = {}
    for view in waiting:
        by_site.setdefault((view.call, view.site, view.step), []).append(view)
    lines = []
    for (call, site, step), views in [*by_site.items()][:_MOST_SITES]:
        place = "for the GPU, in " if views[0].is_for_device else "in "
        at = f", at {site}" if site else ""
        lines.append(f"{_ranks(views)} {place}{call}{_of_step(step)}{at}")
    return lines


def _of_step(step: int) -> str:
    return f" of step {step}" if step else ", before the first step"


@dataclass
class _Track:
    """One rank's process over time. Times in nanoseconds (monotonic)."""

    pid: int
    changed_ns: int
    seen: RankState
    on_core_ns: int | None = None
    idle_since_ns: int | None = None
    quiet_since_ns: int | None = None
    used: tuple[int, int] = (0, 0)  # (time, processor time used until then)
    stepped: tuple[int, int] = (0, 0)
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    num_polls: int = 0  # number of polls since the page changed
    looked_ns: int = 0
    streak: int = 0
    place: Place | None = None


class HangWatch:
    """Names the rank for which others wait, once, and again when it has arrived. Only reports.

    Args:
        after_s: Seconds for which others wait before a rank is named, or ten of their steps if that is longer; inf: no
            rank is named.
        timeouts: The limits after which a rank that uses evenstep is given up.
        num_ranks: Number of the run's ranks.
        may_have_gpus: Whether ranks may have GPUs, so that waiting may use the processor.
    """

    def __init__(self, *, after_s: float, timeouts: PhaseTimeouts, num_ranks: int, may_have_gpus: bool = False) -> None:
        self._may_have_gpus = may_have_gpus
        self._after_s = after_s
        self._timeouts = timeouts
        self._num_ranks = num_ranks
        self._tracks: dict[int, _Track] = {}
        self._looked_ns = 0
        self._num_excused = 0  # checks at which ranks may have run only because of the request for stacks
        self._event: HeldUp | None = None
        self._unshown: set[int] = set()  # ranks that were named without their stacks
        self._workers_due: set[int] = set()  # ranks that were named, and whose loaders' workers may show the cause
        self._longest_s = 0.0
        self._moved_ns: int | None = None
        self._longer: dict[object, float] = {}

    def observe(self, now_ns: int, states: Iterable[RankState]) -> None:
        """Record the present states of ranks."""
        for seen in states:
            track = self._tracks.get(seen.rank)
            if track is None or track.pid != seen.pid:
                track = self._tracks[seen.rank] = _Track(seen.pid, now_ns, seen)
            track.seen = seen
            if seen.page is not None:
                self._note_page(track, seen.page)
            self._note_use(track, seen.on_core_ns, now_ns)
        self._num_excused = max(0, self._num_excused - 1)

    def is_due(self, now_ns: int, others: Sequence[RankView] = ()) -> bool:
        """Whether the stacks of this node's ranks are needed.

        Args:
            now_ns: The time.
            others: Views that other nodes have published.
        """
        allowed_ns = self._allowed_s() * 1e9
        if now_ns - self._looked_ns < min(1e9, allowed_ns / 8):
            return False
        running = [track for track in self._tracks.values() if track.seen.page is not None and _runs(track.seen)]
        asked = self._event is None and any(view.call for view in others)
        if (asked or (self._event is not None and not all(view.is_idle for view in self._event.waiting))) and (
            now_ns - self._looked_ns >= allowed_ns / 4
        ):
            return bool(running)
        return any(self._is_due(track, now_ns, allowed_ns) for track in running)

    def _is_due(self, track: _Track, now_ns: int, allowed_ns: float) -> bool:
        if track.idle_since_ns is not None:
            begins_ns = max(track.idle_since_ns, track.changed_ns) + allowed_ns
            if track.looked_ns < begins_ns <= now_ns:
                return True
        stalled_ns = now_ns - track.changed_ns
        quiet_ns = 0 if track.quiet_since_ns is None else now_ns - track.quiet_since_ns
        waits = track.seen.page is not None and track.seen.page.waiting_since_ns is not None  # by the rank's page
        idle_ns = 0 if track.idle_since_ns is None else now_ns - track.idle_since_ns
        is_idle = waits or (idle_ns > 0 and idle_ns >= min(quiet_ns, stalled_ns) / 2)
        if not self._may_have_gpus and (quiet_ns < allowed_ns / 4 or (is_idle and stalled_ns < allowed_ns)):
            return False
        return stalled_ns >= _poll_at(track.num_polls) * allowed_ns

    def asked(self) -> None:
        """Record that stacks are requested now: writing them uses the processor in a thread that waits."""
        self._num_excused = _MOST_EXCUSED

    def read(self, now_ns: int, stacks: Mapping[int, str], *, with_gpu: Iterable[int] = ()) -> None:
        """Record the stacks of ranks at this time.

        Args:
            now_ns: The time.
            stacks: Text that faulthandler has written, by rank; ranks that have not answered are left out.
            with_gpu: Ranks that have a GPU open.
        """
        allowed_ns = self._allowed_s() * 1e9
        gpus = frozenset(with_gpu)
        self._num_excused = min(1, self._num_excused)
        self._looked_ns = now_ns
        for rank, track in self._tracks.items():
            if not _runs(track.seen):
                continue
            idle_ns = 0 if track.idle_since_ns is None else now_ns - track.idle_since_ns
            threads = parse_stacks(stacks.get(rank, ""))
            place = place_of(threads, is_idle=idle_ns >= min(1e9, allowed_ns / 4), has_gpu=rank in gpus)
            before = track.place
            # A waiting rank's stack stays the same; another rank may be anywhere by now.
            is_same = before is not None and before.call == place.call and (not place.call or before == place)
            track.streak = track.streak + 1 if is_same else 1
            track.place, track.looked_ns = place, now_ns
            track.num_polls = _next_poll(track.num_polls, (now_ns - track.changed_ns) / allowed_ns)

    def views(self, now_ns: int) -> list[RankView]:
        """The known states of this node's ranks, also for the launchers of other nodes."""
        found = (self._view(rank, track, now_ns) for rank, track in sorted(self._tracks.items()))
        return [view for view in found if view is not None]

    def judge(self, now_ns: int, others: Sequence[RankView] = ()) -> list[str]:
        """Lines to print.

        Args:
            now_ns: The time.
            others: Views that other nodes have published.
        """
        views = {view.rank: view for view in (*others, *self.views(now_ns))}
        lines = self._follow_event(now_ns, views)
        found = find_held_up(views.values(), num_ranks=self._num_ranks, longer=self._longer)
        if found is None or (self._event is not None and self._is_known(found)):
            return lines
        self._event, self._longest_s, self._moved_ns = found, found.waited_s, None
        self._workers_due = {view.rank for view in found.missing if view.rank in self._tracks and not view.where}
        if not self._was_said(found):
            return lines
        self._unshown = {view.rank for view in found.missing[:_MOST_STACKS] if not (view.stack or view.has_ended)}
        return lines + describe_held_up(found)

    def loading(self) -> list[int]:
        """Named ranks of this node that are loading data: their loaders' workers may show the cause. Each rank once."""
        places = {rank: self._tracks[rank].place for rank in sorted(self._workers_due)}
        found = [rank for rank, place in places.items() if place is not None and place.phase == LOADING]
        self._workers_due -= set(found)
        return found

    def ended_well(self) -> list[str]:
        """The line that still has to be printed when all ranks have ended without an error."""
        event, self._event = self._event, None
        return [describe_arrival(event, self._longest_s)] if event is not None and self._was_said(event) else []

    def _is_known(self, found: HeldUp) -> bool:
        assert self._event is not None
        if not found.missing or not self._event.missing:
            return bool(found.missing) is bool(self._event.missing)
        return found.key[0] <= self._event.key[0]

    def _follow_event(self, now_ns: int, views: Mapping[int, RankView]) -> list[str]:
        """The line that the ranks continue; empty if they don't."""
        event = self._event
        if event is None:
            return []
        waiting = [views[each.rank] for each in event.waiting if each.rank in views and _waits_still(each, views)]
        if waiting:
            self._longest_s, self._moved_ns = max(self._longest_s, *(view.waited_s for view in waiting)), None
            return self._show_late_stacks(views)
        if self._moved_ns is None:
            self._moved_ns = now_ns
        if now_ns - self._moved_ns < _CONFIRM_NS:
            return []
        self._event, self._unshown, self._workers_due = None, set(), set()
        self._longer[event.key] = 2 * self._longest_s
        return [describe_arrival(event, self._longest_s)] if self._was_said(event) else []

    def _show_late_stacks(self, views: Mapping[int, RankView]) -> list[str]:
        """The stacks of named ranks that have answered only now: on a busy node that may take a while."""
        late = [views[rank] for rank in sorted(self._unshown) if rank in views and views[rank].stack]
        self._unshown -= {view.rank for view in late}
        return [f"rank {view.rank} is here:\n{view.stack}" for view in late]

    def _was_said(self, event: HeldUp) -> bool:
        """Whether this watch prints an event: `StopWatch` names suspended ranks."""
        own = self._tracks.keys()
        return not event.missing or not all(view.is_suspended and view.rank in own for view in event.missing)

    def _note_page(self, track: _Track, page: Heartbeat) -> None:
        if page.time_ns > track.changed_ns:
            track.changed_ns, track.num_polls = page.time_ns, 0
            if track.place is not None and track.place.call:
                track.place = None  # it has made progress
        step, at_ns = track.stepped
        if page.step > step:
            if step and page.stepped_ns > at_ns:
                # Count each step: between two checks there may be many steps, and ranks may have waited in only one of
                # them.
                num_steps = page.step - step
                each_s = (page.stepped_ns - at_ns) / 1e9 / num_steps
                track.steps_s.extend([each_s] * min(num_steps, _STEPS_KEPT))
            track.stepped = (page.step, page.stepped_ns)

    def _note_use(self, track: _Track, on_core_ns: int | None, now_ns: int) -> None:
        if on_core_ns is not None and now_ns > track.used[0]:
            share = (on_core_ns - track.used[1]) / (now_ns - track.used[0])
            track.used = (now_ns, on_core_ns)
            track.quiet_since_ns = None if share > _QUIET else track.quiet_since_ns or now_ns
        if on_core_ns is None:
            track.idle_since_ns = None
        elif self._num_excused and track.on_core_ns is not None:
            track.on_core_ns = on_core_ns
        elif track.on_core_ns is None or on_core_ns - track.on_core_ns > _RUNS_NS:
            was_idle = track.idle_since_ns is not None and track.idle_since_ns < track.looked_ns
            if was_idle and track.place is not None and track.place.call:
                track.place = None
            track.on_core_ns, track.idle_since_ns = on_core_ns, now_ns

    def _allowed_s(self) -> float:
        medians = (statistics.median(track.steps_s) for track in self._tracks.values() if track.steps_s)
        return max(self._after_s, _NUM_STEPS * max(medians, default=0.0))

    def _view(self, rank: int, track: _Track, now_ns: int) -> RankView | None:
        seen, page = track.seen, track.seen.page
        step = 0 if page is None else page.step
        view = RankView(rank, track.pid, step, allowed_s=self._allowed_s(), is_sure=True)
        if seen.exit_code is not None:
            how = f"no longer there: it has ended with status 0, after {step} steps"
            return replace(view, phase=how, has_ended=True) if seen.exit_code == 0 else None
        if page is None:
            return None
        if seen.is_suspended:
            return replace(view, phase=f"stopped (state {seen.state}){_of_step(step)}", is_suspended=True)
        place = track.place
        if place is None:
            return None
        since_ns = page.waiting_since_ns
        if since_ns is not None:
            is_idle, call = True, place.call or "a collective"
        else:
            idle_ns = track.idle_since_ns
            is_idle, call = idle_ns is not None and idle_ns < track.looked_ns - _RUNS_NS, place.call
            since_ns = max(track.changed_ns, idle_ns) if is_idle and idle_ns is not None else track.changed_ns
        if not call and (now_ns - track.looked_ns) / 1e9 > _FRESH_S:
            return None
        return replace(
            view,
            call=call,
            is_for_device=place.is_for_device,
            is_idle=bool(call) and is_idle,
            is_sure=(bool(call) and is_idle) or track.streak >= _SURE_AFTER,
            waited_s=(now_ns - since_ns) / 1e9 if call else 0.0,
            phase=_phase(page, place, seen.state),
            patience=max(place.patience, patience(page) if page.phase in _KNOWN_LONG else 1.0),
            site=place.site,
            stack="" if call else place.stack,
            limit_s=self._limit_s(page),
        )

    def _limit_s(self, page: Heartbeat) -> float | None:
        """When `find_overdue` gives the rank up, if others of this node wait for it in evenstep's collectives."""
        pages = (track.seen.page for track in self._tracks.values())
        waits = any(each is not None and each.waiting_since_ns is not None for each in pages)
        return self._timeouts.of(page) if waits and page.phase != Phase.ENDED else None


def _poll_at(number: int) -> float:
    """The times of stack checks, as multiples of the time after which a rank is named."""
    return _LOOKS_AT[number] if number < len(_LOOKS_AT) else 2.0 ** (number + 1 - len(_LOOKS_AT))


def _next_poll(number: int, stalled: float) -> int:
    while _poll_at(number) <= stalled:
        number += 1
    return number


def _runs(seen: RankState) -> bool:
    return seen.runs and not seen.is_suspended


def _phase(page: Heartbeat, place: Place, state: str) -> str:
    words = WORDS[page.phase]
    if page.phase in (Phase.BETWEEN_STEPS, Phase.STARTING) and place.phase:
        words = place.phase
    if not place.stack:
        words += f" (its place isn't known; process state {state})"
    return f"{words}{_of_step(page.step)}"


def packed(views: Sequence[RankView]) -> str:
    """Encode the states of ranks for the launchers of other nodes; "" if no rank waits or is missing."""
    told = sorted(views, key=lambda view: bool(view.call))[:_MOST_SENT]
    return json.dumps([asdict(replace(view, stack=view.stack[-_MOST_TEXT:])) for view in told]) if told else ""


def unpacked(texts: Iterable[tuple[str, str]]) -> list[RankView]:
    """Decode the texts that other nodes have published. Invalid ones are skipped.

    Args:
        texts: (description of the node, its published text).
    """
    views = []
    for node, text in texts:
        try:
            for each in json.loads(text) if text else []:
                view = RankView(**each)
                views.append(
                    replace(
                        view,
                        call=_safe(view.call),
                        phase=_safe(view.phase),
                        site=_safe(view.site),
                        stack=_safe(view.stack),
                        where=_safe(node),
                    )
                )
        except (ValueError, TypeError):
            continue
    return views


def _safe(text: object) -> str:
    return printable(str(text))[:_MOST_TEXT]
