"""checkpoint lacks what resuming needs (warning).

A checkpoint that is resumed from has the model and the optimizer, but not all that a step depends on.

A resumed run has another learning rate, loss scale or position than the one that was interrupted.

Wrong:

```python
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
if rank == 0:
    torch.save(state, "last.pt")
```

Right:

```python
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
optimizer.load_state_dict(torch.load("last.pt")["optimizer"])
state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
state["scheduler"] = scheduler.state_dict()
if rank == 0:
    torch.save(state, "last.pt")
```

For an exact resume random states and the position in the epoch belong to it: `evenstep.Checkpointer` saves them. Ignore
it if a resumed run is meant to begin a new schedule.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import (
    Call,
    Found,
    Script,
    assignments_to,
    dotted,
    found,
    names_in,
    origins,
    target_of,
    text_of,
    with_what,
)

_OPTIMIZER = r"(?i)optim\w*[^,]*state_dict|opt\w*\.state_dict"


def read(script: Script) -> Found:
    """Saved dictionaries with an optimizer's state but without other state, in a script that loads a state."""
    if not script.named(".load_state_dict"):
        return
    schedules = [call for call in script.calls if "." in call.name and "scheduler" in script.kinds_made(call)]
    scalers = script.named(".GradScaler") if script.named(".scale") else []  # only scalers that are used
    parts = [("the epoch or step", r"(?i)epoch|step|iter|position|progress", '"epoch": epoch')]
    for what, made_by in (("scaler", scalers), ("scheduler", schedules)):
        entry = f'"{what}": {target_of(made_by[0]) or what}.state_dict()' if made_by else ""
        parts = [(f"the {what}", rf"(?i){what[:5]}", entry), *parts] if made_by else parts
    told: set[int] = set()  # one state may be saved in two places
    for save in with_what(script, script.named("torch.save")):
        state = save.argument("obj", 0)
        made = [each for each, _ in origins(script, state, save.frame, depth=2) if isinstance(each, cst.Dict)]
        text = " ".join([*map(text_of, made), *_added(script, state, save)])
        if not made or not re.search(_OPTIMIZER, text) or "**" in text or told & set(map(id, made)):
            continue
        missing = [(name, entry) for name, words, entry in parts if not re.search(words, text)]
        told |= set(map(id, made)) if missing else set()
        if missing:
            evidence = f"the checkpoint has the optimizer, and lacks {' and '.join(name for name, _ in missing)}"
            yield found(save, evidence, mend=f"{text_of(state)} | {{{', '.join(entry for _, entry in missing)}}}")


def _added(script: Script, state: cst.CSTNode | None, save: Call) -> list[str]:
    """The texts of items that are added to a dictionary after it was made."""
    names = names_in(state) if isinstance(state, cst.Name | cst.Attribute) else set()
    return [
        text_of(each.target) + text_of(each.value)
        for each in save.frame.file.assignments
        if isinstance(each.target, cst.Subscript) and dotted(each.target) in names
        if assignments_to(script, dotted(each.target), save.frame)
    ]
