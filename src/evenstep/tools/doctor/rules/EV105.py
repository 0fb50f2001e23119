"""padded samples counted in validation (error).

Validation is divided by a DistributedSampler, which repeats samples until ranks have the same number.

Repeated samples count twice, so the metric depends on the number of ranks.

In training that does no harm. A run confirms it where the numbers do not divide.

Wrong:

```python
val_sampler = DistributedSampler(val_set, shuffle=False)
val_loader = DataLoader(val_set, batch_size=64, sampler=val_sampler)
correct = torch.zeros(())
for x, y in val_loader:
    correct += (model.module(x).argmax(1) == y).sum()
dist.all_reduce(correct)
accuracy = correct / len(val_set)
```

Right:

```python
mine = Subset(val_set, range(rank, len(val_set), world_size))
val_loader = DataLoader(mine, batch_size=64)
correct = torch.zeros(())
for x, y in val_loader:
    correct += (model.module(x).argmax(1) == y).sum()
dist.all_reduce(correct)
accuracy = correct / len(val_set)
```

With accelerate, `gather_for_metrics` leaves repeated samples out, which `gather` does not.

Ignore it if the data set's length is always a multiple of the number of ranks.
"""

import re

from evenstep.tools.doctor.asking import (
    Call,
    Found,
    Script,
    assignments_to,
    distributed,
    dotted,
    found,
    own_name,
    runs,
    samplers,
    text_of,
)
from evenstep.tools.doctor.scene import Scene, Seen, made_at

_TRIMS = re.compile(r":\s*(?:len\(|n\w*_samples|num_|total)")


def read(script: Script) -> Found:
    """Evaluations whose sums or gathered outputs include repeated samples."""
    slices = [text_of(node) for file in script.files for node, _ in file.slices]
    if any(map(_TRIMS.match, slices)) or script.uses("drop_duplicates", "gather_for_metrics", "unique"):
        return
    for loop in script.evaluation_loops:
        frame, loaders = loop.frame, script.makers(script.loaders_of(loop))
        inside = [
            each for each in script.calls if each.frame.function is frame.function and each.frame.file is frame.file
        ]
        for call in inside if not script.prepared.isdisjoint(loaders) else ():
            is_gather = call.last == "gather" and "accelerator" in script.receiver_kinds(call)
            if is_gather and loop in script.loops_around(call.frame):
                name = own_name(script, "accelerator", call) or "accelerator"
                yield found(
                    call,
                    f"{call.text} gathers the samples that were repeated to fill the last batch, too",
                    mend=f"{name}.gather_for_metrics({', '.join(text_of(each) for each in call.arguments)})",
                )
                break
        if not runs(script, inside, _sums) or _keeps_elsewhere(script, inside):
            continue
        for loader in loaders:
            if loader in script.prepared or loader.name.startswith("evenstep."):
                continue
            for site in samplers(script, loader):
                drops = text_of(site.argument("drop_last", 5)) not in ("", "None", "False")
                if not drops and not site.name.startswith("evenstep."):
                    data, dist = text_of(site.argument("dataset", 0)), distributed(site.frame.file)
                    mine = f"range({dist}.get_rank(), len({data}), {dist}.get_world_size())"
                    mend = f"torch.utils.data.Subset({data}, {mine})  # for the loader, in the place of the sampler"
                    yield found(site, f"{site.text} repeats samples, and the metric counts them twice", mend=mend)


def seen(run: Scene) -> Seen:
    """Evaluation samplers that yield more samples than the data set has."""
    for loop in run.loops[0] if run.loops else []:
        count, padded = loop.begin["num_samples"], loop.begin["padded_to"]
        evaluates = loop.num_evaluated and not loop.num_steps and loop.begin["is_distributed"]
        if evaluates and count and padded and padded > count:
            evidence = f"{padded} samples were evaluated by {run.world_size} ranks, where the data set has {count}"
            yield run.finding(made_at(loop), evidence)


def _sums(call: Call) -> bool:
    return call.name.startswith("torch.distributed.") and "reduce" in call.last


def _keeps_elsewhere(script: Script, calls: list[Call]) -> bool:
    """Whether the results go to an unknown object, which may count each sample once."""
    updates = [call for call in calls if call.last in ("update", "add_batch") and call.receiver is not None]
    roots = [(dotted(call.receiver).partition(".")[0], call) for call in updates]
    return any(
        root != "self" and not script.values(each.value, each.frame)
        for root, call in roots
        for each in assignments_to(script, root, call.frame)
    )
