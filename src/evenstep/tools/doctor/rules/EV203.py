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

from evenstep.tools.doctor.asking import (
    Found,
    Script,
    behind,
    found,
    on_all_ranks,
    on_main,
    statement_of,
    target_of,
    text_of,
)

_TRACKERS: tuple[str, ...] = ("wandb.init", "mlflow.start_run", "neptune.init_run", "tensorboardX.SummaryWriter")
_TRACKERS += ("torch.utils.tensorboard.SummaryWriter", "comet_ml.Experiment", "comet_ml.start", "clearml.Task.init")
_TRACKERS += ("aim.Run",)


def read(script: Script) -> Found:
    """Trackers that neither an argument nor a condition limits to one rank."""
    for call in script.named(*_TRACKERS):
        chosen = call.argument("mode") is not None or call.argument("group") is not None or call.has_star
        names = (
            behind(script, each, call.frame, r"(?i)rank|is_main|is_master|process_index", 2) for each in call.arguments
        )
        if not chosen and not any(names) and on_all_ranks(script, call):
            condition, text = on_main(script, call) or "rank == 0", text_of(call.node)
            own = f"{target_of(call) or 'tracker'} = {text} if {condition} else None"
            mend = f"if {condition}:\n    {text}" if statement_of(call) else own
            yield found(call, f"{call.text} runs on every rank", mend=mend)
