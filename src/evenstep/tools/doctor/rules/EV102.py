"""set_epoch never called (error).

A DistributedSampler that shuffles is never told the epoch, or is told the same one each time.

Every epoch has the same order, so batches are made of the same samples each time.

`DistributedSampler` draws its order from a seed and the epoch that it was given, which stays 0 without `set_epoch`.

Wrong:

```python
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=64, sampler=sampler)
for epoch in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
```

Right:

```python
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=64, sampler=sampler)
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
```

Ignore it if the same order is meant, such as while two runs are compared.
"""

import libcst as cst

from evenstep.tools.doctor.asking import (
    Call,
    Edit,
    Found,
    Loop,
    Script,
    dotted,
    found,
    samplers,
    target_of,
    text_of,
    training_loaders,
)
from evenstep.tools.doctor.scene import Event, Refuted, Scene, Seen, is_enough


def read(script: Script) -> Found:
    """Shuffling samplers of training loaders that are read in several epochs, without a changing `set_epoch`."""
    told: set[Call] = set()
    constant: dict[Call, Call] = {}
    for call in script.named(".set_epoch"):
        told_now = script.makers(script.values(call.receiver, call.frame), "sampler")
        if not told_now:
            return  # an unknown object, perhaps this sampler
        if isinstance(call.positional(0), cst.Integer):
            constant |= dict.fromkeys(told_now, call)
        else:
            told.update(told_now)
    for loader in training_loaders(script):
        epochs = _epochs(script, loader)
        if loader in script.prepared or epochs is None:
            continue
        for site in samplers(script, loader):
            if site in told or site.has_star or text_of(site.argument("shuffle", 3)) == "False":
                continue
            told.add(site)
            if site in constant:
                yield found(constant[site], f"{constant[site].text} sets the same epoch each time")
            else:
                mend, edits = _told(script, site, *epochs, is_certain=loader.argument("sampler", 3) is not None)
                evidence = f"{site.text} shuffles, and its set_epoch is never called"
                yield found(site, evidence, mend=mend, edits=edits)


def seen(run: Scene) -> Seen:
    """Two epochs with the same order."""
    loops = run.training_loops()[0] if run.loops else []
    is_refuted, any_found = False, False
    for number in {loop.begin["loader"] for loop in loops}:
        first, *later = [loop for loop in loops if loop.begin["loader"] == number]
        if not later or not first.begin["is_distributed"] or not first.begin["is_shuffled"]:
            continue
        second = later[0]
        count = min(len(first.samples), len(second.samples))
        same = is_enough(count) and first.samples[:count] == second.samples[:count] and len(set(first.samples)) > 1
        if same or _epoch(first.begin) == _epoch(second.begin) is not None:
            any_found = True
            what = f"the first {count} samples of two epochs came in the same order" if same else "two epochs"
            evidence = f"{what}, and the sampler was in epoch {_epoch(second.begin)} in both"
            yield run.finding(first.begin.place, evidence)
        else:
            is_refuted = True
    if is_refuted and not any_found:
        yield Refuted()


def _epoch(begin: Event) -> int | None:
    return None if begin["epoch"] is None else int(begin["epoch"])


def _epochs(script: Script, loader: Call) -> tuple[Loop, Loop | None] | None:
    """(the loop that reads a loader, the loop around it) if the loader is read more than once; else None."""
    for loop in script.training_loops:
        if loader in script.makers(script.loaders_of(loop)):
            around = script.loops_around(loop.frame.parent) if loop.frame.parent is not None else []
            if loop.iterates is None or (isinstance(loop.iterates, cst.Call) and dotted(loop.iterates.func) == "range"):
                return loop, None  # `next(batches)` in a loop over steps
            if around:
                return loop, around[0]
    return None


def _told(
    script: Script, site: Call, loop: Loop, outer: Loop | None, *, is_certain: bool
) -> tuple[str, tuple[Edit, ...]]:
    """(mend, edits) that add `loader.sampler.set_epoch(epoch)` before the loop, if both names are known."""
    read = loop.iterates
    while isinstance(read, cst.Call) and dotted(read.func) in ("enumerate", "tqdm") and read.args:
        read = read.args[0].value
    file, name = loop.frame.file, dotted(read)
    if outer is None or not name or isinstance(read, cst.Subscript) or outer.frame.function is not loop.frame.function:
        return (
            f"{target_of(site) or 'sampler'}.set_epoch(epoch)  # in every epoch, before its loop over the batches",
            (),
        )
    counts = [each for each in file.assignments if each.each and each.frame is outer.frame]
    epoch = dotted(counts[0].target) if counts and text_of(outer.iterates).startswith("range(") else ""
    mend = f"{name}.sampler.set_epoch({epoch or 'epoch'})  # before the loop over {name}"
    line = file.source.text.split("\n")[loop.line - 1]
    indent = line[: len(line) - len(line.lstrip())]
    if not (epoch and is_certain and line.lstrip().startswith("for ")) or len(script.loaders_of(loop)) != 1:
        return mend, ()
    return mend, (Edit(loop.line, loop.line - 1, f"{indent}{name}.sampler.set_epoch({epoch})"),)
