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
    File,
    Found,
    Function,
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
    pairs = [(call, model) for call in made for model in models_of(call)]
    last = {model: optimizer.line for optimizer, model in sorted(pairs, key=lambda pair: pair[0].line)}
    given = _given(script)
    for optimizer, model in pairs:
        before = [each for each in assignments_to(script, model, optimizer.frame) if each.line < optimizer.line]
        known = {one.site for each in before for one in script.values(each.value, each.frame)}
        for each in given.get((optimizer.frame.file, optimizer.frame.function, model), ()):
            if optimizer.line < each.line >= last[model] and _replaces(script, each, model, known):
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


def _given(script: Script) -> dict[tuple[File, Function | None, str], list[Assignment]]:
    """By place and dotted name, what calls give to it or to parts of it: `model.head` is `model`, too."""
    given: dict[tuple[File, Function | None, str], list[Assignment]] = {}
    for each in (each for file in script.files for each in file.assignments):
        name = dotted(each.target) if each.operator == "=" and isinstance(each.value, cst.Call) else ""
        while name:
            given.setdefault((each.frame.file, each.frame.function, name), []).append(each)
            name = name.rpartition(".")[0]
    return given


def _replaces(script: Script, assignment: Assignment, model: str, known: set[cst.CSTNode]) -> bool:
    """True if an assignment puts new parameters into a model, or a model that isn't among those known in its place."""
    made = script.values(assignment.value, assignment.frame)
    is_new = {one.kind for one in made} == {"model"} and known.isdisjoint(one.site for one in made)
    if is_new and model not in names_in(assignment.value):
        return True
    return dotted(assignment.target) == model and _shards_anew(assignment)


def _shards_anew(assignment: Assignment) -> bool:
    """True of FSDP that puts flat parameters in the place of a model's own."""
    if not isinstance(assignment.value, cst.Call):
        return False
    name = assignment.frame.file.resolve(dotted(assignment.value.func))
    flags = " ".join(text_of(each) for each in assignment.value.args)
    return name.endswith("FullyShardedDataParallel") and "use_orig_params=True" not in flags
