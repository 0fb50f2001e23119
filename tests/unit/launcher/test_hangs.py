"""Which rank keeps the others waiting: named once, again when it has come, and never where all is in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from evenstep.ground.health.heartbeat import Heartbeat, Phase
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.launcher.failure.detection import RankState
from evenstep.launcher.failure.hangs import HangWatch, RankView, packed, unpacked
from tests.unit.launcher.test_stacks import ENGINE, TORCH, dump

SECOND = 1_000_000_000
BACKWARD = dump([ENGINE, (f"{TORCH}/_tensor.py", 500, "backward"), ("train.py", 30, "main")])
BARRIER = dump([(f"{TORCH}/distributed/distributed_c10d.py", 5356, "barrier"), ("train.py", 55, "main")])
ASLEEP = dump([("data.py", 12, "fetch"), ("train.py", 20, "main")])
COMPILING = dump([(f"{TORCH}/_inductor/codecache.py", 1, "compile"), ("train.py", 25, "main")])


class Ranks:
    """Ranks as the launcher sees them, four times a second. All times in seconds.

    Attributes:
        stacks: What a rank writes when it is asked.
        runs: Ranks whose main thread uses the processor.
        said: (when, line) of all lines.
        asked: When stacks were asked for.
    changes: Stacks that have changed, for one request after the other.
    """

    def __init__(self, num_ranks: int = 2, *, after_s: float = 10.0, num_others: int = 0, gpus: bool = False) -> None:
        num = num_ranks + num_others
        self.watch = HangWatch(after_s=after_s, timeouts=PhaseTimeouts(), num_ranks=num, may_have_gpus=gpus)
        self.now_s = 100.0
        self.seen = {
            rank: RankState(rank, 10 + rank, page=page(), state="S", on_core_ns=0) for rank in range(num_ranks)
        }
        self.stacks = dict.fromkeys(self.seen, ASLEEP)
        self.runs: set[int] = set(self.seen)
        self.gpus = set(self.seen) if gpus else set()
        self.others: list[RankView] = []
        self.said: list[tuple[float, str]] = []
        self.asked: list[float] = []
        self.changes: Iterator[dict[int, str]] = iter(())

    def step(self, *ranks: int) -> None:
        for rank in ranks or self.seen:
            seen = self.seen[rank]
            assert seen.page is not None
            now_ns = int(self.now_s * SECOND)
            stepped = replace(seen.page, step=seen.page.step + 1, stepped_ns=now_ns, time_ns=now_ns)
            self.seen[rank] = replace(seen, page=stepped)

    def train(self, num_steps: int, step_s: float) -> None:
        for _ in range(num_steps):
            self.go(step_s)
            self.step()

    def hold(self, stacks: dict[int, str]) -> None:
        """From now on these ranks wait where that is; they run no more."""
        self.stacks |= stacks
        self.runs -= {rank for rank, stack in stacks.items() if stack in (BACKWARD, BARRIER)}

    def go(self, seconds: float) -> list[str]:
        """Let time pass; returns what is said meanwhile."""
        before = len(self.said)
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += min(0.25, end_s - self.now_s)
            now_ns = int(self.now_s * SECOND)
            for rank, seen in self.seen.items():
                if rank in self.runs:
                    self.seen[rank] = replace(seen, on_core_ns=(seen.on_core_ns or 0) + SECOND // 5)
            self.watch.observe(now_ns, self.seen.values())
            if self.watch.is_due(now_ns, self.others):
                self.asked.append(self.now_s)
                self.watch.asked()
                for rank, seen in self.seen.items():  # to write its stacks takes a moment
                    self.seen[rank] = replace(seen, on_core_ns=(seen.on_core_ns or 0) + 2_000_000)
                self.watch.observe(now_ns, self.seen.values())
                self.stacks |= next(self.changes, {})
                self.watch.read(now_ns, self.stacks, with_gpu=self.gpus)
            self.said += [(self.now_s, line) for line in self.watch.judge(now_ns, self.others)]
        return [line for _, line in self.said[before:]]


def page(step: int = 0, phase: Phase = Phase.BETWEEN_STEPS) -> Heartbeat:
    time_ns = 100 * SECOND
    return Heartbeat(pid=1, phase=phase, step=step, collective=0, is_waiting=False, time_ns=time_ns)


def test_a_missing_rank_is_named_after_ten_seconds_with_its_stack_and_again_when_it_has_come() -> None:
    ranks = Ranks(3)
    ranks.train(20, 0.5)
    ranks.hold({0: BACKWARD, 2: BACKWARD})
    assert ranks.go(9.5) == []
    first, stack, where = ranks.go(1.5)
    assert first == (
        "rank 1 (pid 11) is between steps of step 20; ranks 0, 2 wait since 10 s. The run goes on; another line says "
        "when rank 1 has come"
    )
    assert stack.startswith("rank 1 is here:\n")
    assert '  File "data.py", line 12, in fetch' in stack
    assert where == "ranks 0, 2 wait in backward of step 20, at train.py:30 in main"
    assert ranks.go(300) == [], "once"
    ranks.runs = {0, 1, 2}
    (line,) = ranks.go(1)
    assert line.startswith("rank 1 (pid 11) has come, after 31")
    assert ranks.go(5) == []
    assert ranks.watch.ended_well() == []


def test_a_wait_that_has_ended_by_itself_is_not_named_again_before_twice_its_length() -> None:
    ranks = Ranks()
    ranks.train(20, 0.5)
    for seconds in (15, 20, 28):  # an evaluation on rank 1 after each epoch
        ranks.hold({0: BARRIER})
        ranks.go(seconds)
        ranks.runs = {0, 1}
        ranks.train(20, 0.5)
    assert sum("is here" in line for _, line in ranks.said) == 1
    ranks.hold({0: BARRIER})
    ranks.go(130)
    assert sum("is here" in line for _, line in ranks.said) == 2, "a hang at the same place is not passed over"


def test_ranks_that_wait_in_different_places_are_all_named() -> None:
    ranks = Ranks()
    ranks.train(20, 0.5)
    ranks.hold({0: BACKWARD, 1: BARRIER})
    told, *places = ranks.go(12)
    assert told.startswith("all ranks wait for each other since 10 s, but in different places")
    assert places == [
        "rank 0 waits in backward of step 20, at train.py:30 in main",
        "rank 1 waits in barrier of step 20, at train.py:55 in main",
    ]


def test_one_long_call_of_all_ranks_is_named_after_a_minute() -> None:
    ranks = Ranks()
    ranks.train(20, 0.5)
    ranks.hold({0: BACKWARD, 1: BACKWARD})
    assert ranks.go(55) == []
    assert ranks.go(10)[0].startswith("all ranks have waited in the same call since 60 s")


def test_what_may_take_long_has_longer_and_a_first_step_says_so() -> None:
    ranks = Ranks()
    ranks.hold({0: BARRIER})
    assert "No step has been finished yet, and the first step may take long" in ranks.go(12)[0]
    compiling = Ranks()
    compiling.train(20, 0.5)
    compiling.hold({0: BACKWARD, 1: COMPILING})
    assert compiling.go(55) == []
    assert "is compiling of step 20" in compiling.go(30)[0]
    evaluates = Ranks()
    evaluates.train(20, 0.5)
    at = evaluates.seen[1]
    evaluates.seen[1] = replace(at, page=replace(page(20, Phase.EVALUATING), stepped_ns=0))
    evaluates.hold({0: BACKWARD})
    assert evaluates.go(55) == []
    assert "is in an evaluation of step 20" in evaluates.go(30)[0]


def test_with_a_gpu_three_equal_looks_stand_for_an_idle_processor() -> None:
    reads = dump([(f"{TORCH}/cuda/__init__.py", 1, "synchronize"), ("train.py", 33, "main")])
    ranks = Ranks(gpus=True)
    ranks.train(20, 0.5)
    ranks.stacks[0] = reads
    assert ranks.go(9.5) == []
    told = ranks.go(3)
    assert told[0].startswith("rank 1 (pid 11) is between steps of step 20; rank 0 waits since 1")
    assert told[-1] == "rank 0 waits for the GPU, in synchronize of step 20, at train.py:33 in main"
    alone = Ranks(gpus=True)
    alone.train(20, 0.5)
    alone.stacks = dict.fromkeys(alone.stacks, reads)
    assert alone.go(300) == [], "a long evaluation on GPUs"
    uneven = Ranks(gpus=True)
    uneven.train(20, 0.5)
    uneven.stacks = dict.fromkeys(uneven.stacks, reads)
    uneven.changes = itertools.cycle([{1: ASLEEP}, {1: reads}])
    assert uneven.go(300) == [], "one rank reads from its GPU, the other computes at that moment"


def test_ranks_of_another_node_are_known_by_what_its_launcher_publishes() -> None:
    here, there = Ranks(1, num_others=1), Ranks(1, num_others=1)
    for ranks in (here, there):
        ranks.train(20, 0.5)
    here.hold({0: BACKWARD})
    views = there.watch.views
    for _ in range(50):
        here.go(0.25)
        published = packed(here.watch.views(int(here.now_s * SECOND)))
        there.others = unpacked([("on node 0 (a)", published)])
        there.go(0.25)
        sent = [replace(view, rank=1, pid=77) for view in views(int(there.now_s * SECOND))]
        here.others = unpacked([("on node 1 (b)", packed(sent))])
    assert here.said[0][1].startswith("rank 1 (pid 77, on node 1 (b)) is between steps of step 20; rank 0 waits since")
    assert '"data.py", line 12' in here.said[1][1]


@pytest.mark.parametrize("text", ["", "[", "3", '[{"rank": 1}]', '[{"rank": 1, "pid": 2, "step": 3, "more": 4}]'])
def test_what_another_node_publishes_may_be_anything(text: str) -> None:
    assert unpacked([("on node 1", text)]) == []
