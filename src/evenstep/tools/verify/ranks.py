"""`evenstep verify script.py`: compares the steps of a script on 1, 2 and 4 ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from evenstep.checks import counted
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.environment import openmp_threads, with_settings
from evenstep.ground.host.named_files import validate_script
from evenstep.ground.host.temporary import private_directory
from evenstep.launcher.options.resources import count_cores
from evenstep.tools.observing.launch import Observed, launched
from evenstep.tools.verify import causes, compare
from evenstep.tools.verify.evidence import Plan, Run, read_run
from evenstep.tools.verify.rehearsal import RehearsalPlan
from evenstep.tools.verify.report import Report, Verdict

MODULE = "evenstep.tools.verify.rank"  # the module that runs the script in each rank

Start = Callable[[Path, Path, int], "tuple[int, str]"]


def verify_ranks(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: Sequence[int] = (1, 2, 4),
    num_steps: int = 5,
    device: str | None = None,
    say: Callable[[str], None],
    start: Start | None = None,
) -> Report:
    """Run a script on several numbers of ranks, compare the runs step by step, and find causes of differences.

    Args:
        script: The user's script. It runs unchanged, and ends after `num_steps` steps of an optimizer.
        arguments: The command-line arguments of the script.
        ranks: The numbers of ranks; the others are compared with the smallest.
        num_steps: The number of steps to compare.
        device: The value of `evenstep run --device`.
        say: Called with each line of progress.
        start: Runs the script, given (plan, rehearsal, number of ranks). Returns the exit status and the output.
            None: `evenstep run`.

    Raises:
        ConfigurationError: There is no such script, or a number makes no sense.
        UsageError: The script fails, or makes no steps.
    """
    validate_script(script)
    if len(set(ranks)) < 2 or min(ranks) < 1:
        received = ",".join(map(str, ranks))
        raise ConfigurationError(
            f"--nproc-per-node {received}: give two or more numbers of ranks, each at least 1, as in 1,2,4."
        )
    if num_steps < 1:
        raise ConfigurationError(f"--steps {num_steps}: at least 1.")
    with private_directory("verify") as root:
        launch = start or _launcher(Observed(MODULE, script, arguments, max(ranks), device, _threads_for(max(ranks))))
        runs = _Runs(root, script, sorted(set(ranks)), num_steps, launch, say)
        runs.make()
        verdicts = [_verdict(runs, number) for number in runs.numbers[1:]]
        base = runs.of(runs.base)
        alone = causes.find_faults(base)
        return Report(script, base.num_steps, runs.base, base.num_virtual_ranks, tuple(verdicts), tuple(alone))


class _Runs:
    """The runs of one script, each made when it is first needed."""

    def __init__(
        self, root: Path, script: str, numbers: list[int], num_steps: int, start: Start, say: Callable[[str], None]
    ) -> None:
        self.numbers = numbers
        self.base = numbers[0]
        self._root, self._script, self._num_steps = root, script, num_steps
        self._start, self._say = start, say
        self._made: dict[tuple[int, bool], Run] = {}
        self._batch_sizes: list[int] | None = None  # of the run on the most ranks, with the script's own sizes
        self._is_sharded = False  # whether one of the runs so far used FSDP2
        self._num_data_ranks = 0  # ranks with their own samples in the run on the most ranks; 0: not known yet
        self._began_s = time.monotonic()

    def make(self) -> None:
        """Make all runs in the script's own precision, the one on the most ranks first."""
        count = len(self.numbers)
        self._say(f"{count} runs, and up to {count} more in float64 where results differ")
        for number in reversed(self.numbers):
            self.of(number)
        lengths = {number: self.of(number).num_steps for number in self.numbers}
        if len(set(lengths.values())) > 1:
            received = ", ".join(f"{steps} on {number}" for number, steps in lengths.items())
            self._say(f"the script makes {received} ranks: only the first {min(lengths.values())} steps are compared")

    def of(self, number: int, *, in_double: bool = False) -> Run:
        """The run on a number of ranks, in the script's precision or in float64."""
        key = number, in_double
        if key not in self._made:
            self._made[key] = self._make(number, in_double)
        return self._made[key]

    def _make(self, number: int, in_double: bool) -> Run:
        name = counted(number, "rank") + (", in float64" if in_double else "")
        at, most = len(self._made) + 1, 2 * len(self.numbers)
        left_s = (time.monotonic() - self._began_s) / max(1, at - 1) * (most - at + 1)
        about = f" (at most about {left_s:.0f} s left)" if at > 1 else ""
        self._say(f"run {at} of at most {most}: {self._script} on {name}{about}")
        directory = self._root / f"{number}-{in_double}"
        directory.mkdir()
        # Ranks that hold parts of the same layers get the same samples, so they count as one.
        largest, data = self.numbers[-1], self._num_data_ranks
        num_ranks = max(1, number * data // largest) if data else number
        sizes = sizes_for(self._batch_sizes or [], seen_on=data or largest, num_ranks=num_ranks)
        if sizes is None:
            received = ", ".join(map(str, self._batch_sizes or []))
            raise ConfigurationError(
                f"--nproc-per-node: the batches of {self.numbers[-1]} ranks, {received} on each, can't be divided over "
                f"{number}. Choose numbers of ranks that divide each other."
            )
        skipped = self.of(number).skipped if in_double else ()
        plan = Plan(str(directory), self._num_steps, number, in_double, sizes, self._is_sharded, skipped, self._script)
        plan.write(directory / "plan.json")
        # Redirect the script's checkpoints, so that it finds none to resume from.
        (directory / "traces").mkdir()
        RehearsalPlan(str(directory / "checkpoints"), str(directory / "traces")).write(directory / "rehearsal.json")
        status, said = self._start(directory / "plan.json", directory / "rehearsal.json", number)
        if status != 0:
            if status == ConfigurationError.exit_code:  # from the script's calls: the last line suffices
                raise UsageError(said.strip().rpartition("evenstep: ")[2])
            needs = " (float64 is what tells rounding from mistakes)" if in_double else ""
            raise UsageError(
                f"{self._script} on {name}, failed with status {status}{needs}. It said:\n{said[-4000:].rstrip()}"
            )
        run = read_run(directory, number)
        if run.num_steps == 0:
            raise UsageError(
                f"{self._script} on {name} has made no step that could be seen: a call of a torch optimizer's step()."
            )
        self._is_sharded |= run.ranks[0][-1].is_sharded
        if self._batch_sizes is None:
            self._batch_sizes, self._num_data_ranks = run.ranks[0][-1].batch_sizes, run.num_data_ranks
        return run


def _verdict(runs: _Runs, number: int) -> Verdict:
    """Compare the run on a number of ranks with the one on the fewest, and find the cause of a difference."""
    base, run = runs.of(runs.base), runs.of(number)
    faults = tuple(causes.find_faults(run))
    if compare.are_identical(base, run):
        return Verdict(number, 0.0, None, faults)
    reference = runs.of(runs.base, in_double=True)
    unseeded = causes.find_unseeded(base, reference)
    if unseeded:
        found = compare.Difference(1, compare.UNSEEDED)
        return Verdict(number, compare.closeness(base, run), found, (*unseeded, *_others(faults, unseeded)))
    if base.num_virtual_ranks:
        other = compare.first_other_bits(base, run)
        if other is not None:
            why = causes.find_causes(base, run, other.step - 1, rounding=1e-6)
            return Verdict(number, compare.closeness(base, run), other, (*why, *_others(faults, why)))
    skipped = compare.first_other_skip(base, run)
    if skipped is not None:
        return Verdict(number, compare.closeness(base, run), skipped, (causes.others_skipped(run), *faults))
    difference = compare.first_difference(base, reference, run)
    rounding = compare.coarsest_rounding(base, reference)
    if difference is None and rounding <= compare.COARSE:
        return Verdict(number, compare.closeness(base, run), None, faults, rounding)
    double = runs.of(number, in_double=True)
    difference = compare.first_difference(base, reference, run, double)
    why = [] if difference is None else causes.find_causes(reference, double, difference.step - 1, rounding=1e-12)
    return Verdict(number, compare.closeness(base, run), difference, (*why, *_others(faults, why)), rounding)


def _others(faults: Sequence[causes.Cause], received: Sequence[causes.Cause]) -> list[causes.Cause]:
    """The faults of other kinds than the causes that were found already."""
    lead = "besides: " if received else ""
    kinds = {each.kind for each in received}
    return [replace(fault, text=f"{lead}{fault.text}") for fault in faults if fault.kind not in kinds]


def _launcher(observed: Observed) -> Start:
    def start(plan: Path, rehearsal: Path, number: int) -> tuple[int, str]:
        # One run starts its ranks cold, as other launchers do, and evenstep's on several nodes. Each rank then has its
        # own seed for hashes, so a script that depends on the order of a set shows a difference.
        options = ["--cold-start"] if number == observed.ranks else []
        env = {**with_settings(), "TORCHDYNAMO_DISABLE": "1"}
        made = replace(observed, ranks=number, options=options)
        with launched(made, plan.parent, env, [str(plan), str(rehearsal)]) as run:
            return run.process.wait(), run.said()

    return start


def sizes_for(seen: Sequence[int], *, seen_on: int, num_ranks: int) -> list[tuple[int, int]] | None:
    """The `Plan.batch_sizes` of a run on another number of ranks; None if a global batch can't be divided. Pure.

    Args:
        seen: The batch sizes of one rank in the run on the most ranks.
        seen_on: The number of ranks of that run.
        num_ranks: The number of ranks of the next run.
    """
    if any(size * seen_on % num_ranks for size in seen):
        return None
    return [(size, size * seen_on // num_ranks) for size in seen]


def _threads_for(most_ranks: int) -> int | None:
    """The threads of each rank, the same in all runs, because other numbers of threads add in another order.

    None if the user has set a number.
    """
    return None if openmp_threads() else max(1, count_cores() // most_ranks)
