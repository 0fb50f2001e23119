"""optimizer of replaced parameters (error).

The optimizer is built from parameters that the model replaces afterwards.

The optimizer steps tensors that the model no longer has: the new parameters never change.

Wrong:

```python
net = torchvision.models.vit_b_16()
optimizer = torch.optim.AdamW(net.parameters())
net.heads = nn.Linear(768, 10)
```

Right:

```python
net = torchvision.models.vit_b_16()
net.heads = nn.Linear(768, 10)
optimizer = torch.optim.AdamW(net.parameters())
```

Ignore it if the new layers are meant to stay as they are.
"""

import libcst as cst

from evenstep.tools.doctor.asking import (
    Assignment,
    Call,
    Found,
    Script,
    assignments_to,
    dotted,
    found,
    models_of,
    names_in,
    text_of,
)
from evenstep.tools.doctor.scene import Scene, Seen


def read(script: Script) -> Found:
    """Assignments to a model, or to its parts, between its optimizer and the next one."""
    made = [call for call in script.calls if call.name[:11] == "torch.optim" and "optimizer" in script.kinds_made(call)]
    for optimizer in made:
        for model in models_of(optimizer):
            later = [
                each.line for each in made if each is not optimizer and f"{model}.parameters" in text_of(each.node)
            ]
            for each in optimizer.frame.file.assignments:
                is_behind = each.frame.function is optimizer.frame.function and each.line > optimizer.line
                is_last = not later or max(later) <= each.line
                if is_behind and is_last and each.operator == "=" and _replaces(script, each, model, optimizer):
                    evidence = (
                        f"{text_of(each.target)} is replaced after line {optimizer.line} has built the optimizer of "
                        f"{model}'s parameters"
                    )
                    yield found((each.frame.file, each.line), evidence)
                    break


def seen(run: Scene) -> Seen:
    """Tensors of an optimizer that no module has, beside parameters that no optimizer has."""
    for event in run.evidence.all("stepped"):
        if event["stale"] and event["untrained"]:
            evidence = (
                f"{event['stale']} tensors of the optimizer belong to no module, and {event['untrained']} parameters "
                f"with a gradient belong to no optimizer"
            )
            yield run.finding(event.place, evidence)
            return


def _replaces(script: Script, assignment: Assignment, model: str, optimizer: Call) -> bool:
    """True if an assignment puts new parameters into a model, or another model into its place."""
    value, target = assignment.value, dotted(assignment.target)
    if not isinstance(value, cst.Call):
        return False
    made = script.things(value, assignment.frame)
    before = [each for each in assignments_to(script, model, optimizer.frame) if each.line < optimizer.line]
    known = {one.site for each in before for one in script.things(each.value, each.frame)}
    is_new = {one.kind for one in made} == {"model"} and not {one.site for one in made} & known
    is_its = target == model or target.startswith(f"{model}.")
    return (is_its and is_new and model not in names_in(value)) or (target == model and _shards_anew(assignment, value))


def _shards_anew(assignment: Assignment, value: cst.Call) -> bool:
    """True of FSDP that puts flat parameters in the place of a model's own."""
    name = assignment.frame.file.resolve(dotted(value.func))
    flags = " ".join(text_of(each) for each in value.args)
    return name.endswith("FullyShardedDataParallel") and "use_orig_params=True" not in flags
