"""scheduler of another number of steps (error).

The scheduler is made for the number of batches of all ranks together, and stepped once per local batch.

The schedule ends at a fraction of its way: the learning rate never comes down.

Wrong:

```python
loader = DataLoader(train_set, batch_size=64, sampler=sampler)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(train_set) // 64)
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
    scheduler.step()
```

Right:

```python
loader = DataLoader(train_set, batch_size=64, sampler=sampler)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
for x, y in loader:
    loss_fn(model(x), y).backward()
    optimizer.step()
    scheduler.step()
```

Ignore it if the schedule is meant to end early.
"""

import re

import libcst as cst

from evenstep.tools.doctor.asking import (
    WORLD,
    Call,
    Found,
    Frame,
    Script,
    behind,
    dotted,
    found,
    is_nothing,
    origins,
    own_name,
    shortened,
    text_of,
    walk,
)

_LENGTHS = ("total_steps", "T_max", "num_training_steps", "steps_per_epoch", "T_0", "total_iters")
_DATA = re.compile(r"(?:\w+\.)*\w*(?:data_?set|_set|_ds|_data)")


def read(script: Script) -> Found:
    """Schedulers that step per batch, with a length that counts the batches of all ranks."""
    for call in script.calls:
        if not call.name.startswith(("torch.optim.lr_scheduler.", "transformers.get_")) or not _is_stepped(
            script, call
        ):
            continue
        for keyword in _LENGTHS:
            length = call.argument(keyword)
            if length is None or behind(script, length, call.frame, WORLD):
                continue
            for each, where in origins(script, length, call.frame) if _divides_loaders(script) else ():
                part = _whole_batches(script, each, where)
                if part:
                    own = f"len({own_name(script, 'loader', call) or 'loader'})"
                    evidence = f"{keyword}={shortened(text_of(each), 60)} counts the batches of all ranks together"
                    yield found(call, evidence, mend=f"{keyword}={text_of(each).replace(part, own)}")
                    return


def _is_stepped(script: Script, scheduler: Call) -> bool:
    """Whether a scheduler is stepped in a step loop."""
    if "scheduler" not in script.kinds_made(scheduler):
        return False
    calls = [each for each in script.calls if each.last == "step"]
    steps = [each for each in calls if scheduler in script.makers(script.values(each.receiver, each.frame))]
    return any(set(script.step_loops) & set(script.loops_around(each.frame)) for each in steps)


def _whole_batches(script: Script, node: cst.CSTNode, frame: Frame) -> str:
    """The code within a node that divides `len(dataset)`; "" without. A loader's length counts one rank's batches."""
    for each in walk(node):
        if isinstance(each, cst.BinaryOperation) and isinstance(each.operator, cst.Divide | cst.FloorDivide):
            counted = _counted(each.left)
            kinds = script.kinds(counted, frame)
            is_data = bool(kinds & {"dataset", "subset"}) or bool(_DATA.fullmatch(dotted(counted)))
            if "loader" not in kinds and is_data:
                return text_of(each)
    return ""


def _counted(node: cst.CSTNode) -> cst.CSTNode | None:
    """The argument of a call of `len`; None for other expressions."""
    is_length = isinstance(node, cst.Call) and dotted(node.func) == "len" and bool(node.args)
    return node.args[0].value if isinstance(node, cst.Call) and is_length else None


def _divides_loaders(script: Script) -> bool:
    sites = script.makers(script.training_loaders)
    ours = [each for each in sites if not each.name.startswith("evenstep.")]
    return any(each in script.prepared or not is_nothing(each.argument("sampler", 3)) for each in ours)
