"""all ranks start a tracker (warning).

Every rank opens a run of an experiment tracker, or a writer of event files.

The tracker shows one run per rank, and several processes write event files of the same directory.

Wrong:

```python
writer = SummaryWriter("runs/first")
```

Right:

```python
writer = SummaryWriter("runs/first") if rank == 0 else None
```

A run per rank on purpose, with the rank in its name or with `group=`, is no finding. Ignore it if the tracker joins
such runs by itself.
"""

from evenstep.tools.doctor.asking import Found, Script, behind, found, on_all_ranks, on_main, statement_of
from evenstep.tools.doctor.scene import Scene, Seen, on_all

_TRACKERS: tuple[str, ...] = ("wandb.init", "mlflow.start_run", "neptune.init_run", "tensorboardX.SummaryWriter")
_TRACKERS += ("torch.utils.tensorboard.SummaryWriter", "comet_ml.Experiment", "comet_ml.start", "clearml.Task.init")
_TRACKERS += ("aim.Run",)


def read(script: Script) -> Found:
    """Trackers that no argument, and no condition, keeps to one rank."""
    for call in script.named(*_TRACKERS):
        chosen = call.argument("mode") is not None or call.argument("group") is not None or call.has_star
        names = (
            behind(script, each, call.frame, r"(?i)rank|is_main|is_master|process_index", 2) for each in call.arguments
        )
        if not chosen and not any(names) and on_all_ranks(script, call):
            condition = on_main(script, call) or "rank == 0"
            is_alone = bool(statement_of(call))
            mend = f"if {condition}:\n    {call.text}" if is_alone else f"{call.text} if {condition} else None"
            yield found(call, f"{call.text} runs on every rank", mend=mend)


def seen(run: Scene) -> Seen:
    """Trackers that all ranks opened."""
    for place, ranks in on_all(run.evidence.of("tracker", hurried=True)).items():
        yield run.finding(place, f"{run.world_size} ranks opened {ranks[0][0]['tracker']}")
