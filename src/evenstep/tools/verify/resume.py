"""`evenstep verify --resume`: compares a script that was killed and resumed with an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.store import LocalDirectory
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.environment import with_settings
from evenstep.ground.host.named_files import validate_script
from evenstep.ground.host.temporary import private_directory
from evenstep.tools.observing.launch import Observed, launched
from evenstep.tools.verify.ranks import MODULE
from evenstep.tools.verify.rehearsal import RehearsalPlan
from evenstep.tools.verify.traces import first_difference, read_trace


def verify_resume(
    script: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    kill_at: int | None,
    num_steps: int | None,
    say: Callable[[str], None],
) -> bool:
    """Whether a script that is killed and started again ends with the same bits as an undisturbed run.

    Args:
        script: The user's script, with a `Checkpointer`. `evenstep run` starts it.
        arguments: The command-line arguments of the script.
        num_ranks: The number of ranks.
        kill_at: The step in which all ranks are killed; None: after two thirds of the steps. A checkpoint is saved a
            few steps before.
        num_steps: The number of steps after which the runs end; None: the script's own end.
        say: Called with each line of progress.

    Raises:
        ConfigurationError: There is no such script, or a number makes no sense.
        UsageError: The script fails, or makes no steps with a `Checkpointer`.
    """
    validate_script(script)
    if num_steps is not None and num_steps < 2:
        raise ConfigurationError(f"--steps {num_steps}: at least 2, one before the kill and one after.")
    with private_directory("verify") as root:
        observed = Observed(MODULE, script, arguments, num_ranks)

        def run(part: str, plan: RehearsalPlan, *, dies: bool = False) -> None:
            Path(plan.traces).mkdir(exist_ok=True)
            plan.write(root / "plan.json")
            with launched(observed, root, with_settings(), ["", str(root / "plan.json")], goes_on=dies) as made:
                status, said = made.process.wait(), made.said()
            if dies == (status == 0):
                ending = "ended before it could be killed" if dies else f"failed with status {status}"
                raise UsageError(f"the {part} of {script} {ending}. It said:\n{said}")

        def plan(run_name: str, traces: str, save_at: int = 0, kill: int = 0) -> RehearsalPlan:
            return RehearsalPlan(str(root / run_name), str(root / traces), save_at, kill, num_steps or 0)

        say(f"1 of 3: {script} on {num_ranks} ranks, undisturbed")
        run("undisturbed run", plan("a", "straight"))
        straight = [read_trace(root / "straight" / f"rank-{rank}.jsonl") for rank in range(num_ranks)]
        last = max(straight[0], default=0)
        if last < 2:
            raise UsageError(
                f"{script} has made {last} steps with a Checkpointer. It needs one, with the objects that it trains, "
                f"checkpoint.resume() before the loop and checkpoint.step() after each step of the optimizer."
            )
        kill_at = max(2, last * 2 // 3) if kill_at is None else kill_at
        if not 2 <= kill_at <= last:
            raise ConfigurationError(f"--kill-at {kill_at}: the script makes {last} steps; name one from 2 to {last}.")
        save_at = max(1, kill_at - 1 - last // 10)
        say(f"2 of 3: saved at step {save_at} of {last}, and killed at step {kill_at}")
        run("run to be killed", plan("b", "killed", save_at, kill_at), dies=True)
        # The script resumes from its own checkpoint if that is later, and may have removed ours.
        saved = max(checkpoints_in(LocalDirectory(root / "b")), default=0)
        if saved < save_at:
            raise UsageError(f"the run to be killed left no checkpoint of step {save_at}.")
        say("3 of 3: started again")
        run("run that resumes", plan("b", "resumed"))
        resumed = [read_trace(root / "resumed" / f"rank-{rank}.jsonl") for rank in range(num_ranks)]
        # A local tier may have later checkpoints, up to the last step before the kill.
        latest = kill_at if (root / "b-local").exists() else saved + 1
    first = min(resumed[0], default=0)
    if not saved < first <= latest:
        say(f"the second start began with step {first}, and not with step {saved + 1}: is checkpoint.resume() called?")
        return False
    difference = first_difference(straight, resumed)
    if difference is None:
        say(f"identical: steps {first} to {last}, every sample and every tensor that is saved, on {num_ranks} ranks")
        return True
    say(f"different: {difference}")
    return False
